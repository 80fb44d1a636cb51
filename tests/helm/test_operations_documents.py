"""What is derived from the chart is up to date: the values in its README, and the snapshot of
its default rendering.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import yaml

from tests.helm.snapshot import SNAPSHOT, snapshot_of
from tests.helm.tools.chart_docs import README, VALUES, explained, values_section, with_section

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest

SHOWN_LINES = 80
UPDATE = "if that is meant, run `make chart-docs` and look at what git shows"


def test_the_readme_has_the_groups_of_values() -> None:
    readme = README.read_text(encoding="utf-8")
    expected = with_section(readme, values_section(VALUES.read_text(encoding="utf-8")))
    changes = "\n".join(
        difflib.unified_diff(
            readme.splitlines(), expected.splitlines(), "README.md", "values.yaml", lineterm="", n=0
        )
    )
    assert readme == expected, f"{changes}\n{UPDATE}"


def test_every_value_is_explained_but_for_kubernetes_own() -> None:
    bare = {
        one.path.rpartition(".")[2]
        for one in explained(VALUES.read_text(encoding="utf-8"))
        if not one.meaning
    }
    assert bare <= {
        "cpu",
        "memory",
        "periodSeconds",
        "timeoutSeconds",
        "failureThreshold",
        "maxSurge",
        "maxUnavailable",
        "limits",
        "requests",
        "startup",
        "liveness",
        "readiness",
        "image",
    }


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
