"""Every value of the chart is described, in one place, and the snapshot of its default rendering
is up to date.
"""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING

from tests.helm.snapshot import SNAPSHOT, snapshot_of
from tests.helm.tools.describe_values import (
    README,
    SCHEMA,
    VALUES,
    dumped,
    target,
    with_descriptions,
    with_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helm.conftest import Chart

SHOWN_LINES = 80
UPDATE = "if that is meant, run `make chart-snapshot` and look at what git shows"


def test_schema_and_readme_say_what_values_yaml_says() -> None:
    values, schema, readme = (path.read_text(encoding="utf-8") for path in (VALUES, SCHEMA, README))
    update = "run `make chart-snapshot`"
    assert schema == f"{dumped(with_descriptions(json.loads(schema), values))}\n", update
    assert readme == with_table(readme, values), update


def test_every_property_has_a_description() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))

    def bare(node: object, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            for name, child in dict(node.get("properties", {})).items():
                inherits = child
                while "/properties/" in inherits.get("$ref", ""):
                    inherits = target(schema, inherits)
                if not inherits.get("description"):
                    yield f"{path}.{name}"
            for name, child in node.items():
                yield from bare(child, f"{path}.{name}")
        elif isinstance(node, list):
            for child in node:
                yield from bare(child, path)

    assert list(bare(schema, "")) == []


def test_the_default_rendering_is_the_snapshot(chart: Chart) -> None:
    expected, found = SNAPSHOT.read_text(encoding="utf-8"), snapshot_of(chart.render())
    changes = list(
        difflib.unified_diff(
            expected.splitlines(), found.splitlines(), "snapshot", "rendering", lineterm="", n=4
        )
    )
    assert expected == found, "\n".join([*changes[:SHOWN_LINES], UPDATE])
