"""Each alert fires on series that call for it, in time, and stays quiet on those that do not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.helm.conftest import REPOSITORY
from tests.helm.promql_values import NAME, Series
from tests.helm.queries import Selected, selectors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.exposition import Exposed

RELEASE = "inference/cache"
OURS = {"lmcache_release": RELEASE, "namespace": "inference"}
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
UNITS = {"m": MINUTE_S, "h": HOUR_S}
ALERTS = {
    alert["alert"]: alert
    for group in yaml.safe_load(
        (REPOSITORY / "helm" / "lmcache" / "files" / "alerts.yaml").read_text(encoding="utf-8")
    ).values()
    for alert in group
}
CALM, GROWING, ONE_STEP = "0x120", "0+60x120", "0x30 1x89"


@dataclass(frozen=True)
class Case:
    """Series, in the notation of promtool.

    Attributes:
        alert: Which alert.
        series: Those of this release.
        others: Those of another release, which never count.
        until_s: When to look.
    """

    alert: str
    series: Mapping[str, str]
    others: Mapping[str, str] = field(default_factory=dict)
    until_s: float = 2 * HOUR_S
    interval_s: float = MINUTE_S

    def __str__(self) -> str:
        return self.alert


def by_pod(metric: str, **values: str) -> dict[str, str]:
    return {f'{metric}{{pod="{pod}"}}': value for pod, value in values.items()}


def http(ok: str, failed: str) -> dict[str, str]:
    labels = 'lmcache_component="lookup",pod="a"'
    return {
        f'lmcache_http_requests_total{{{labels},status="200"}}': ok,
        f'lmcache_http_requests_total{{{labels},status="503"}}': failed,
    }


def lookups(fast: str, all_of_them: str) -> dict[str, str]:
    name = "lmcache_http_request_duration_seconds_bucket"
    bounds = {"0.05": fast, "0.25": all_of_them, "+Inf": all_of_them}
    return {
        f'{name}{{pod="a",route="/v1/lookup",le="{bound}"}}': values
        for bound, values in bounds.items()
    }


def tier(event: str, values: str, of: str = "disk") -> dict[str, str]:
    return {f'lmcache_tier_events_total{{pod="a",tier="{of}",event="{event}"}}': values}


def counted(metric: str, label: str, values: str) -> dict[str, str]:
    return {f'{metric}{{pod="a",{label}}}': values}


def shares(stored: str, refused: str, service: str) -> dict[str, str]:
    name = f"lmcache_{service}_{{}}_chunks_total"
    return by_pod(name.format("stored"), a=stored) | by_pod(name.format("refused"), a=refused)


def hits(loaded: str) -> dict[str, str]:
    asked = by_pod("lmcache_sidecar_requested_chunks_total", a="0+6000x360")
    return asked | counted("lmcache_sidecar_loaded_chunks_total", 'tier="memory"', loaded)


def brokers(*, failures: str = CALM, **shared: str) -> dict[str, str]:
    return by_pod("lmcache_broker_is_shared", **shared) | by_pod(
        "lmcache_broker_sharing_failures_total", a=failures
    )


def build(**versions: str) -> dict[str, str]:
    return {
        f'lmcache_build_info{{pod="{pod}",service="lmcache-sidecar",version="{version}"}}': "1x800"
        for pod, version in versions.items()
    }


def files(num_open: int) -> dict[str, str]:
    opened, most = f"{num_open}x120", "1000x120"
    return by_pod("process_open_fds", a=opened) | by_pod("process_max_fds", a=most)


def pulls(failed: str) -> dict[str, str]:
    return tier("pulls", "0+60x120", "peers") | tier("failed_pulls", failed, "peers")


def drained(outcome: str, values: str) -> dict[str, str]:
    return counted("lmcache_sidecar_drained_chunks_total", f'outcome="{outcome}"', values)


def turned_away(values: str) -> dict[str, str]:
    return counted("lmcache_sidecar_refused_clients_total", 'reason="too_many"', values)


def reviews(verdict: str, values: str) -> dict[str, str]:
    return counted("lmcache_webhook_reviews_total", f'verdict="{verdict}"', values)


def stores(service: str, refused: str) -> dict[str, str]:
    return shares("0+600x120", refused, service)


UP, DOWN, REMOTE = "1x120", "0x120", "storage"
SLOW = {"until_s": 30 * HOUR_S, "interval_s": 5 * MINUTE_S}
LATE = {"until_s": 7 * HOUR_S}
CORRUPT, FAILED_CALLS = "lmcache_sidecar_corrupt_chunks_total", "vllm:lmcache_failed_calls_total"
DEGRADED = "lmcache_lookup_degraded_answers_total"
TURNED_AWAY = "lmcache_broker_turned_away_requests_total"
EXPIRED = "lmcache_broker_expired_leases_total"
FIRES = [
    Case("LmcacheTargetDown", by_pod("up", a=UP, b=DOWN)),
    Case("LmcacheServerErrors", http("0+60x120", "0+6x120")),
    Case("LmcacheFilesRunOut", files(950)),
    Case("LmcacheVersionsDiffer", build(a="1.0", b="1.1"), **LATE),
    Case("LmcacheHitRatioCollapsed", hits("0+4800x300 1440000+300x60"), **SLOW),
    Case("LmcacheCorruptChunks", by_pod(CORRUPT, a=ONE_STEP)),
    Case("LmcacheCorruptChunks", tier("corrupt_chunks", ONE_STEP, of=REMOTE)),
    Case("LmcacheSidecarRefusesStores", stores("sidecar", "0+120x120")),
    Case("LmcacheSidecarRefusesEngines", turned_away(ONE_STEP)),
    Case("LmcachePullsFail", pulls("0+12x120")),
    Case("LmcacheDrainIncomplete", drained("left", "0x30 4x3")),
    Case("LmcacheConnectorFails", by_pod(FAILED_CALLS, a=ONE_STEP)),
    Case("LmcacheStorageRefusesStores", stores("storage", "0+60x120")),
    Case("LmcacheDiskFails", tier("failed_writes", ONE_STEP)),
    Case("LmcacheWritesDropped", tier("dropped_writes", GROWING)),
    Case("LmcacheLookupDegraded", by_pod(DEGRADED, a=GROWING)),
    Case("LmcacheLookupSlow", lookups("0+50x120", "0+60x120")),
    Case("LmcacheBrokerAlone", brokers(a=UP, b=DOWN)),
    Case("LmcacheBrokerAlone", brokers(a=DOWN, failures=GROWING)),
    Case("LmcacheBrokerTurnsAway", by_pod(TURNED_AWAY, a=GROWING)),
    Case("LmcacheLeasesExpire", by_pod(EXPIRED, a="0x30 2x5 4x84")),
    Case("LmcacheInjectionFails", reviews("throttled", ONE_STEP)),
    Case("LmcacheInjectionFails", reviews("unfinished", ONE_STEP)),
]
QUIET = [
    Case("LmcacheTargetDown", by_pod("up", a="1x30 0x3 1x80"), others=by_pod("up", b=DOWN)),
    Case("LmcacheServerErrors", http("0+600x120", "0+6x120")),
    Case("LmcacheFilesRunOut", files(850)),
    Case("LmcacheVersionsDiffer", build(a="1.0", b="1.0"), others=build(c="1.1"), **LATE),
    Case("LmcacheHitRatioCollapsed", hits("0+4800x300 1440000+3000x60"), **SLOW),
    Case("LmcacheCorruptChunks", tier("evicted_chunks", GROWING) | tier("corrupt_chunks", CALM)),
    Case("LmcacheSidecarRefusesStores", stores("sidecar", "0+30x120")),
    Case("LmcacheSidecarRefusesEngines", turned_away("7x120")),
    Case("LmcachePullsFail", pulls("0+3x120")),
    Case("LmcacheDrainIncomplete", drained("handed_over", GROWING)),
    Case("LmcacheConnectorFails", by_pod(FAILED_CALLS, a=CALM)),
    Case("LmcacheStorageRefusesStores", stores("storage", CALM)),
    Case("LmcacheDiskFails", tier("rejected_writes", GROWING) | tier("missing_files", CALM)),
    Case("LmcacheWritesDropped", tier("dropped_writes", ONE_STEP)),
    Case("LmcacheLookupDegraded", by_pod(DEGRADED, a=ONE_STEP)),
    Case("LmcacheLookupSlow", lookups("0+60x120", "0+60x120")),
    Case("LmcacheBrokerAlone", brokers(a=DOWN), others=brokers(b=UP, c=UP)),
    Case("LmcacheBrokerAlone", brokers(a=UP, b="1x30 0x5 1x80")),
    Case("LmcacheBrokerTurnsAway", by_pod(TURNED_AWAY, a=ONE_STEP)),
    Case("LmcacheLeasesExpire", by_pod(EXPIRED, a=ONE_STEP)),
    Case("LmcacheInjectionFails", reviews("declined", GROWING)),
]


def expression_of(alert: str) -> str:
    return str(ALERTS[alert]["expr"]).replace("$release", f'lmcache_release="{RELEASE}"')


def seconds(duration: str) -> float:
    return float(duration[:-1]) * UNITS[duration[-1]]


@pytest.mark.parametrize(
    ("case", "fires"),
    [*((case, True) for case in FIRES), *((case, False) for case in QUIET)],
    ids=lambda value: str(value) if isinstance(value, Case) else "fires" if value else "quiet",
)
def test_an_alert_fires_when_it_should(case: Case, fires: bool) -> None:
    written = Series(case.interval_s)
    for series, values in case.series.items():
        written.add(series, values, OURS)
    for series, values in case.others.items():
        written.add(series, values, OURS | {"lmcache_release": "other/release"})
    firing = written.first_firing(
        expression_of(case.alert), seconds(ALERTS[case.alert].get("for", "0m")), case.until_s
    )
    assert bool(firing) == fires, firing
    named = set(re.findall(r"\$labels\.(\w+)", ALERTS[case.alert]["summary"]))
    assert all(named <= dict(labels).keys() for labels in firing), (
        f"the summary names {named}, which are not all there: {firing}"
    )
    assert all(
        NAME not in dict(labels) and dict(labels).get("lmcache_release", RELEASE) == RELEASE
        for labels in firing
    )


def test_every_alert_is_tried_both_ways() -> None:
    assert {case.alert for case in FIRES} == {case.alert for case in QUIET} == set(ALERTS)


def test_what_may_happen_once_is_shown_at_0_before(
    scraped: Mapping[str, dict[str, Exposed]],
) -> None:
    """`increase` of a counter that is first seen at 1 is 0: the first, perhaps only, damaged
    chunk would fire no alert.
    """
    samples: dict[str, list[Mapping[str, str]]] = {}
    for service in scraped.values():
        for name, metric in service.items():
            samples.setdefault(name, []).extend(metric.samples)
    once = [selected for alert in ALERTS for selected in increases(expression_of(alert))]
    assert len(once) >= 8
    for selected in once:
        if selected.metric.startswith("vllm:"):
            continue
        wanted = {
            label: value.split("|")
            for label, value in selected.matchers.items()
            if label != "lmcache_release"
        }
        for label, values in wanted.items():
            there = {sample.get(label) for sample in samples[selected.metric]}
            assert set(values) <= there, (
                f"{selected.metric} does not show {values} from the start: {there}"
            )
        assert samples[selected.metric], f"{selected.metric} is not there from the start"


def increases(expression: str) -> list[Selected]:
    """What an expression takes the increase of."""
    parts = expression.split("increase(")[1:]
    return [selectors(part[: part.index("[")])[0] for part in parts]
