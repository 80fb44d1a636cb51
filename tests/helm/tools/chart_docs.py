"""Write what is derived from the chart: "Values" in its README, and the snapshot of its default
rendering (`make chart-docs`).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.helm.conftest import HELM_FOLDER, Chart, fetch_helms
from tests.helm.snapshot import SNAPSHOT, snapshot_of

if TYPE_CHECKING:
    from yaml.nodes import MappingNode

README = HELM_FOLDER / "lmcache" / "README.md"
VALUES = HELM_FOLDER / "lmcache" / "values.yaml"
HEADING = "## Values"
FIRST_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")
INTRODUCTION = """\
`helm show values helm/lmcache` prints every value with its default and meaning.
`values.schema.json` has the types; unknown names are refused.
`make chart-docs` writes this list of the groups from values.yaml."""


@dataclass(frozen=True)
class Value:
    """A value of the chart.

    Attributes:
        path: Its dotted name.
        meaning: Its comment, or that of the first value of the same name.
    """

    path: str
    meaning: str


def groups(text: str) -> list[Value]:
    """Return the top-level values."""
    return [one for one in explained(text) if "." not in one.path]


def explained(text: str) -> Iterator[Value]:
    """Yield every value of values.yaml with its comment."""
    lines = text.splitlines()
    meanings: dict[str, str] = {}
    anchored = set[int]()

    def below(parent: MappingNode, prefix: str) -> Iterator[Value]:
        for key, node in parent.value:
            comment = _comment_above(lines, key.start_mark.line)
            if comment:
                meanings.setdefault(key.value, comment)
            path = f"{prefix}{key.value}"
            yield Value(path, comment or meanings.get(key.value, ""))
            if isinstance(node, yaml.MappingNode) and id(node) not in anchored:
                anchored.add(id(node))  # an alias repeats the node of its anchor
                yield from below(node, f"{path}.")

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from below(root, "")


def _comment_above(lines: list[str], line: int) -> str:
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip("# "))
    return " ".join(comment)


def values_section(text: str) -> str:
    """Return the README's section about the groups of values.yaml."""
    told = {one.path: FIRST_SENTENCE.split(one.meaning, 1)[0] for one in groups(text)}
    rows = [f"| `{name}` | {_escaped(meaning)} |" for name, meaning in told.items()]
    return "\n".join([HEADING, "", INTRODUCTION, "", "| group | meaning |", "|---|---|", *rows, ""])


def _escaped(meaning: str) -> str:
    """Escape what Markdown would take for HTML or for the next column."""
    return meaning.replace("<", "&lt;").replace("|", r"\|")


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
