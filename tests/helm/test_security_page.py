"""docs/security.md says of ports, accounts and defaults what the chart installs."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import yaml

from tests.helm.conftest import HELM_FOLDER, MODELS, REPOSITORY

if TYPE_CHECKING:
    from tests.helm.conftest import Chart

PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
LOOPBACK_PORT = 8083
EVERYTHING = {
    **MODELS,
    "webhook.enabled": True,
    "storage.compat.enabled": True,
    "storage.compat.clientsFrom": [{"podSelector": {}}],
    "broker.podDeletionCost.enabled": True,
    "kvEvents.enabled": True,
    "sidecar.mover.enabled": True,
}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_ports_are_those_of_the_containers(chart: Chart) -> None:
    listed = {int(port) for port in re.findall(r"^\| (\d+)", section("Ports"), re.MULTILINE)}
    opened = {
        port["containerPort"]
        for _, container in chart.render(EVERYTHING).containers()
        for port in container.get("ports", [])
    }
    assert listed == opened | {LOOPBACK_PORT}


def rules(chart: Chart) -> set[tuple[str, str]]:
    roles = chart.render(EVERYTHING).of_kind("Role", "ClusterRole")
    found = [rule for role in roles for rule in role["rules"]]
    return {pair for rule in found for pair in itertools.product(rule["resources"], rule["verbs"])}


def test_accounts_have_the_documented_rights_alone(chart: Chart) -> None:
    said = {
        (kind, verb)
        for verbs, what in re.findall(
            r"^\|[^|]*\| ([a-z, ]+) \| ([^|]*`[^|]*) \|", section("Accounts"), re.MULTILINE
        )
        for kind in re.findall(r"`(\w+)`", what)
        for verb in verbs.split(", ")
    }
    assert rules(chart) == said


def test_the_defaults_are_those_of_the_chart() -> None:
    values = yaml.safe_load((HELM_FOLDER / "lmcache" / "values.yaml").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", section("Defaults"), re.MULTILINE)
    assert len(rows) > 5
    for path, default in rows:
        value = values
        for name in path.split("."):
            value = value[name]
        assert value == yaml.safe_load(default), path
