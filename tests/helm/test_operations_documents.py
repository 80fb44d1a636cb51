"""Every value of the chart is explained, and the snapshot of its default rendering is up to
date.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import yaml

from tests.helm.conftest import HELM_FOLDER
from tests.helm.snapshot import SNAPSHOT, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yaml.nodes import MappingNode

    from tests.helm.conftest import Chart, Manifest

VALUES = HELM_FOLDER / "lmcache" / "values.yaml"
SHOWN_LINES = 80
UPDATE = "if that is meant, run `make chart-snapshot` and look at what git shows"


def explained(text: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of every value of values.yaml, and its comment or that of the first
    value of the same name.
    """
    lines = text.splitlines()
    meanings: dict[str, str] = {}
    anchored = set[int]()

    def below(parent: MappingNode, prefix: str) -> Iterator[tuple[str, str]]:
        for key, node in parent.value:
            comment = comment_above(lines, key.start_mark.line)
            if comment:
                meanings.setdefault(key.value, comment)
            path = f"{prefix}{key.value}"
            yield path, comment or meanings.get(key.value, "")
            if isinstance(node, yaml.MappingNode) and id(node) not in anchored:
                anchored.add(id(node))  # an alias repeats the node of its anchor
                yield from below(node, f"{path}.")

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from below(root, "")


def comment_above(lines: list[str], line: int) -> str:
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip("# "))
    return " ".join(comment)


def test_every_value_is_explained_but_for_kubernetes_own() -> None:
    bare = {
        path.rpartition(".")[2]
        for path, meaning in explained(VALUES.read_text(encoding="utf-8"))
        if not meaning
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
