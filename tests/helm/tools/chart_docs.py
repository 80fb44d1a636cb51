"""Writes what is derived from the chart: "Values" in its README, and the snapshot of its default
rendering (`make chart-docs`).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.helm.conftest import HELM_FOLDER, Chart, fetch_helms
from tests.helm.snapshot import SNAPSHOT, snapshot_of

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

README = HELM_FOLDER / "lmcache" / "README.md"
VALUES = HELM_FOLDER / "lmcache" / "values.yaml"
BAR = r"\|"
HEADING = "## Values"
INTRODUCTION = """\
Written by `make chart-docs` from the comments of values.yaml; `values.schema.json` has the type of each, and refuses names that are not
here."""


@dataclass(frozen=True)
class Value:
    """One value.

    Attributes:
        path: Its dotted name.
        default: As JSON; "" for a heading.
        meaning: Its comment.
    """

    path: str
    default: str
    meaning: str


class Values:
    """The values of a file with their comments.

    Args:
        text: Of values.yaml.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._root = yaml.compose(text)
        self._meanings: dict[str, str] = {}
        self._seen: dict[int, str] = {}

    def sections(self) -> Iterator[tuple[Value, list[Value]]]:
        """Each top-level name, and what is below it."""
        for key, node in _pairs(self._root):
            meaning = self._meaning(key.start_mark.line, key.value)
            rows = list(self._below(key.value, node)) if _is_open(node) else []
            yield Value(key.value, "" if rows else _default(node), meaning), rows

    def _below(self, path: str, parent: Node) -> Iterator[Value]:
        for key, node in _pairs(parent):
            own = f"{path}.{key.value}"
            meaning = self._meaning(key.start_mark.line, key.value)
            if not _is_open(node):
                yield Value(own, _default(node), meaning)
                continue
            twin = self._seen.setdefault(id(node), own)
            if twin != own:
                yield Value(own, "", f"{meaning} As `{twin}`.".strip())
                continue
            if meaning and meaning[0].isupper():
                yield Value(own, "", meaning)
            yield from self._below(own, node)

    def _meaning(self, line: int, name: str) -> str:
        """The comment right above; for a name that has none that of its first appearance."""
        comment: list[str] = []
        while line > 0 and self._lines[line - 1].lstrip().startswith("#"):
            line -= 1
            comment.insert(0, self._lines[line].lstrip("# "))
        if comment:
            self._meanings.setdefault(name, " ".join(comment))
        return " ".join(comment) or self._meanings.get(name, "")


def _pairs(node: Node | None) -> list[tuple[Any, Node]]:
    assert isinstance(node, yaml.MappingNode)
    mapping: MappingNode = node
    return list(mapping.value)


def _is_open(node: Node) -> bool:
    return isinstance(node, yaml.MappingNode) and bool(node.value)


def _default(node: Node) -> str:
    return json.dumps(yaml.safe_load(yaml.serialize(node)), ensure_ascii=False)


def values_section(text: str) -> str:
    """The README's section about the values of that text."""
    lines = [HEADING, "", INTRODUCTION]
    for heading, rows in Values(text).sections():
        default = f" Default: `{heading.default}`." if heading.default else ""
        lines += ["", f"### {heading.path}", "", f"{_text(heading.meaning)}{default}".strip()]
        if rows:
            lines += ["", "| value | default | meaning |", "|---|---|---|"]
            lines += [
                f"| `{row.path}` | {_code(row.default)} | {_text(row.meaning)} |" for row in rows
            ]
    return "\n".join(lines) + "\n"


def _text(meaning: str) -> str:
    """As Markdown, which would take <name> for HTML and | for the next column."""
    return meaning.replace("<", "&lt;").replace("|", BAR)


def _code(default: str) -> str:
    return f"`{default.replace('|', BAR)}`" if default else ""


def with_section(readme: str, section: str) -> str:
    """The README with that section instead of its own, which is the last."""
    before = re.split(rf"^{HEADING}$", readme, maxsplit=1, flags=re.MULTILINE)[0]
    return f"{before.rstrip()}\n\n{section}"


def main() -> None:
    """Write both."""
    readme = README.read_text(encoding="utf-8")
    README.write_text(
        with_section(readme, values_section(VALUES.read_text(encoding="utf-8"))), encoding="utf-8"
    )
    folder = Path(tempfile.mkdtemp())
    try:
        chart = Chart.built(folder, fetch_helms())
        SNAPSHOT.write_text(snapshot_of(chart.render()), encoding="utf-8")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
