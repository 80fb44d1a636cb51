"""Every value of the chart is described, in one place, and the snapshot of its default rendering
is up to date.
"""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.helm.snapshot import SNAPSHOT, snapshot_of
from tests.helm.tools.describe_values import (
    README,
    SCHEMA,
    VALUES,
    described,
    dumped,
    target,
    with_descriptions,
    with_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helm.conftest import Chart, Manifest

COMMENTED = "storage:\n  # Run\n  # it.\n  on: true\nlookup:\n  on: true\nother:\n  on: true\n"
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


def test_a_value_without_a_comment_has_that_of_another_component() -> None:
    comments = {path: (text, is_own) for path, text, is_own in described(COMMENTED)}
    assert comments["storage", "on"] == ("Run it.", True)
    assert comments["lookup", "on"] == ("Run it.", False)
    assert comments["other", "on"] == ("", False)


def test_two_comments_about_one_property_are_refused() -> None:
    shared = {"properties": {"on": {"type": "boolean"}}}
    schema = {
        "definitions": {"shared": shared},
        "properties": {
            "a": {"$ref": "#/definitions/shared"},
            "b": {"$ref": "#/definitions/shared"},
        },
    }
    one = "a:\n  # One.\n  on: true\nb:\n  on: true\n"
    found = with_descriptions(schema, one)
    assert found["definitions"]["shared"]["properties"]["on"]["description"] == "One."
    with pytest.raises(ValueError, match=r"b\.on: shares a definition"):
        with_descriptions(schema, one.replace("b:\n", "b:\n  # Another.\n"))


def test_the_default_rendering_is_the_snapshot(chart: Chart) -> None:
    expected, found = SNAPSHOT.read_text(encoding="utf-8"), snapshot_of(chart.render())
    changes = list(
        difflib.unified_diff(
            expected.splitlines(), found.splitlines(), "snapshot", "rendering", lineterm="", n=4
        )
    )
    assert expected == found, "\n".join([*changes[:SHOWN_LINES], UPDATE])


def test_the_snapshot_holds_nothing_that_was_generated(chart: Chart) -> None:
    """Two renderings without a cluster differ in their secrets; their snapshots do not."""
    again = chart.template(None, (), "helm4")
    manifests: list[Manifest] = [one for one in yaml.safe_load_all(again.stdout) if one]
    assert manifests != chart.render().manifests
    assert snapshot_of(type(chart.render())(again.stdout, manifests)) == snapshot_of(chart.render())


def test_the_snapshot_shows_a_change(chart: Chart) -> None:
    assert snapshot_of(chart.render({"lookup.config.redis_timeout_ms": 101})) != snapshot_of(
        chart.render()
    )
