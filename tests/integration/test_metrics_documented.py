"""docs/metrics.md names every metric that the services, as real processes, and the connector
show, and none that they do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from lmcache_core.telemetry import LABEL_PROFILE, MeasuredError
from lmcache_node.collectors import TIER_EVENTS, CodecErrorCollector, TierCollector, exported_name
from lmcache_sidecar.metrics import DESCRIBED as OF_SIDECAR
from lmcache_storage.compat.dialect import CloseReason, CompatCommand
from lmcache_storage.metrics import COMPAT_CLOSED_TOTAL, COMPAT_REQUESTS_TOTAL
from lmcache_storage.metrics import DESCRIBED as OF_STORAGE
from prometheus_client import CollectorRegistry, generate_latest

from tests.fixtures.exposition import Exposed, exposed, scraped_services
from tests.fixtures.fake_vllm import imported_connector

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROW = re.compile(
    r"\| `(?P<name>[a-z0-9_:]+)` \| (?P<kind>counter|gauge|histogram) \| (?:(?P<labels>[a-z, ]+)"
    r" )?\| .+ \|"
)
EVENT = re.compile(r"\| `(?P<name>[a-z_]+)` \| .+ \|")
SECTIONS = {
    "sidecar": ("All services", "sidecar and cache_storage", "sidecar"),
    "cache_storage": ("All services", "sidecar and cache_storage", "cache_storage"),
    "lookup": ("All services", "lookup"),
    "broker": ("All services", "broker"),
    "webhook": ("All services", "webhook"),
}
pytestmark = pytest.mark.timeout(300)  # it starts and ends all services


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Exposed]]:
    return scraped_services(tmp_path_factory.mktemp("shown"))


def documented(section: str) -> dict[str, Exposed]:
    rows = [ROW.fullmatch(line) for line in section.splitlines() if line.startswith("| `")]
    assert all(rows), "a row is name, type, labels, meaning"
    return {
        row["name"]: Exposed(
            row["kind"], frozenset(filter(None, (row["labels"] or "").split(", ")))
        )
        for row in rows
        if row
    }


@pytest.mark.parametrize("service", SECTIONS)
def test_what_a_service_shows_is_what_is_documented(
    service: str, sections: Mapping[str, str], shown: Mapping[str, dict[str, Exposed]]
) -> None:
    promised = {
        name: metric
        for section in SECTIONS[service]
        for name, metric in documented(sections[section]).items()
    }
    found = shown[service]
    assert {name: metric.kind for name, metric in found.items()} == {
        name: metric.kind for name, metric in promised.items()
    }
    labels = {name: metric.labels for name, metric in found.items() if metric.labels is not None}
    assert labels == {name: promised[name].labels for name in labels}


def test_labels_of_what_has_not_happened_yet_are_documented(sections: Mapping[str, str]) -> None:
    for section, described in (("sidecar", OF_SIDECAR), ("cache_storage", OF_STORAGE)):
        rows = documented(sections[section])
        for name, one in described.items():
            labels = rows[exported_name(name)].labels
            assert labels == (frozenset({one.label}) if one.label else frozenset()), name
    registry = CollectorRegistry()
    registry.register(
        TierCollector(lambda: {"disk": {"get_calls": 1, "num_chunks": 1, TIER_EVENTS[0]: 1}})
    )
    error = MeasuredError(0.1, 0.1)
    registry.register(CodecErrorCollector(lambda: {LABEL_PROFILE: (error, error)}))
    rows = documented(sections["sidecar"]) | documented(sections["sidecar and cache_storage"])
    for name, metric in exposed(generate_latest(registry).decode()).items():
        assert metric.labels is None or metric == rows[name], name


def test_all_values_of_a_label_are_known_but_for_what_is_configured() -> None:
    for described in (OF_SIDECAR, OF_STORAGE):
        for name, one in described.items():
            assert bool(one.values) == (one.label in ("reason", "outcome", "command", "source")), (
                name
            )
    assert OF_STORAGE[COMPAT_CLOSED_TOTAL].values == tuple(CloseReason)
    assert OF_STORAGE[COMPAT_REQUESTS_TOTAL].values == tuple(
        command.name.lower() for command in CompatCommand
    )


def test_the_events_of_tiers_are_documented(sections: Mapping[str, str]) -> None:
    assert tuple(EVENT.findall(sections["Events of tiers"])) == TIER_EVENTS


def test_the_connectors_metrics_are_documented(sections: Mapping[str, str]) -> None:
    with imported_connector():
        from lmcache_core.integrations.vllm import stats

        kinds = {
            stats.PROMETHEUS_PREFIX + name: kind
            for kind, names in (
                ("counter", stats.DESCRIBED),
                ("gauge", stats.GAUGES),
                ("histogram", stats.OBSERVED),
            )
            for name in names
        }
    assert documented(sections["vLLM's connector"]) == {
        name: Exposed(kind, frozenset()) for name, kind in kinds.items()
    }
