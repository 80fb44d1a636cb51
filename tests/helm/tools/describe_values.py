"""Copy the comments of the chart's values.yaml into values.schema.json and the README's table
(`make chart-snapshot`), so that each value is described in one place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode

CHART = Path(__file__).resolve().parents[3] / "helm" / "lmcache"
VALUES, SCHEMA, README = (
    CHART / name for name in ("values.yaml", "values.schema.json", "README.md")
)
COMPONENTS = ("storage", "lookup", "broker", "redis", "sidecar", "payload", "webhook")
COMPONENTS += ("modelDefaults", "releaseTest")
"""A value of theirs without a comment has that of the first component with the same value."""
TABLE = re.compile(r"(?<=\| value \| meaning \|\n\|---\|---\|\n)(?:\|.*\n)*")
SCHEMA_WIDTH = 140

Schema = dict[str, Any]


def described(text: str) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yield the path of each value in values.yaml, its description, and whether it is its own."""
    lines = text.splitlines()
    inherited: dict[tuple[str, ...], str] = {}

    def below(parent: MappingNode, prefix: tuple[str, ...]) -> Iterator[tuple[Any, str, bool]]:
        for key, node in parent.value:
            path = (*prefix, key.value)
            own = _comment_above(lines, key.start_mark.line)
            text = own
            if path[0] in COMPONENTS:
                text = text or inherited.get(path[1:], "")
                if text:
                    inherited.setdefault(path[1:], text)
            yield path, text, bool(own)
            if isinstance(node, MappingNode):
                yield from below(node, path)

    root = yaml.compose(text)
    assert isinstance(root, MappingNode)
    yield from below(root, ())


def _comment_above(lines: list[str], line: int) -> str:
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(each.lstrip("# ") for each in lines[first:line])


def target(schema: Schema, node: Schema) -> Schema:
    """Return the node that a node's `$ref` names."""
    found = schema
    for name in node["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return found


def resolved(schema: Schema, node: Schema) -> Schema:
    """Return the node that a node's `$ref` leads to in the end, or the node itself."""
    while "$ref" in node:
        node = target(schema, node)
    return node


def extend(schema: Schema) -> None:
    """Give each node with `x-extends` the properties of that definition, by reference.

    JSON Schema's own composition would cost the errors that name an unknown property.
    """
    definitions = schema["definitions"]
    for node in (*definitions.values(), *schema["properties"].values()):
        base = node.get("x-extends")
        if base is not None:
            own = {
                name: each
                for name, each in node["properties"].items()
                if f"/properties/{name}" not in each.get("$ref", "")
            }
            inherited = {
                name: {"$ref": f"#/definitions/{base}/properties/{name}"}
                for name in definitions[base]["properties"]
            }
            node["properties"] = own | inherited


def with_descriptions(schema: Schema, values: str) -> Schema:
    """Return the schema with what its nodes extend and the descriptions of values.yaml.

    Raises:
        ValueError: two values that share a node of the schema have different comments.
    """
    schema = json.loads(json.dumps(schema))
    extend(schema)
    own_of: dict[int, str] = {}
    for path, text, is_own in described(values):
        node = schema
        for name in path:
            found = resolved(schema, node).get("properties", {}).get(name)
            if found is None:
                break
            node = found
        else:
            if own_of.get(id(node), text) != text and is_own:
                raise ValueError(
                    f"{'.'.join(path)}: shares a definition whose comment is"
                    f" {own_of[id(node)]!r}: put this one on the value above it"
                )
            if text and id(node) not in own_of:
                own_of[id(node)] = text
                node.pop("description", None)
                rest = dict(node)
                node.clear()
                node |= {"description": text} | rest
    return schema


def dumped(node: Any, indent: int = 0, room: int = SCHEMA_WIDTH) -> str:
    """Return JSON that keeps on one line what fits there."""
    line = json.dumps(node, ensure_ascii=False)
    if len(line) <= room - indent or not node or not isinstance(node, dict | list):
        return line
    inner = " " * (indent + 2)
    if isinstance(node, list):
        items = [f"{inner}{dumped(each, indent + 2)}" for each in node]
        return "[\n" + ",\n".join(items) + f"\n{' ' * indent}]"
    items = []
    for name, each in node.items():
        head = f"{inner}{json.dumps(name)}: "
        items.append(head + dumped(each, indent + 2, SCHEMA_WIDTH - len(head) + indent + 1))
    return "{\n" + ",\n".join(items) + f"\n{' ' * indent}}}"


def with_table(readme: str, values: str) -> str:
    """Return the README with a row for each top-level value: the first sentence about it."""
    rows = [
        f"| `{path[0]}` | {text.partition('. ')[0].rstrip('.')} |\n"
        for path, text, _ in described(values)
        if len(path) == 1
    ]
    changed, count = TABLE.subn(lambda _: "".join(rows), readme)
    assert count == 1, "README.md has no table of values"
    return changed


def main() -> None:
    """Write both."""
    values = VALUES.read_text(encoding="utf-8")
    schema = with_descriptions(json.loads(SCHEMA.read_text(encoding="utf-8")), values)
    SCHEMA.write_text(f"{dumped(schema)}\n", encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_table(readme, values), encoding="utf-8")


if __name__ == "__main__":
    main()
