"""What Prometheus and Grafana get: monitors that find ports, alerts and dashboards that ask for
metrics which exist.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from lmcache_node.collectors import TIER_EVENTS
from lmcache_webhook.injection.plan import INJECTED

from tests.fixtures.fake_vllm import imported_connector
from tests.helm.conftest import MODEL, MODELS, MONITORING, REPOSITORY, TLS, containers_of
from tests.helm.queries import selectors, without_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.exposition import Exposed as Metric
    from tests.helm.conftest import Chart, Manifest, Rendering

VALUES: Manifest = {
    **MODELS,
    "webhook.enabled": True,
    "monitoring.podMonitors.enabled": True,
    "monitoring.rules.enabled": True,
    "monitoring.dashboards.enabled": True,
    "networkPolicy.metricsFrom": MONITORING,
}
# all services are started for it, which takes minutes where processors are shared
pytestmark = pytest.mark.timeout(600)
DASHBOARDS = sorted((REPOSITORY / "helm" / "lmcache" / "files" / "dashboards").glob("*.json"))
RUNBOOKS = REPOSITORY / "docs" / "runbooks.md"
OF_TARGETS = {"namespace", "pod", "lmcache_release", "lmcache_component", "lmcache_model"}
"""Labels that Prometheus itself and the PodMonitors give."""
Exposed = dict[str, set[str]]
"""Name of a sample -> its labels; none where there is no sample yet."""
OF_VLLM = {"vllm:num_requests_running", "vllm:num_requests_waiting"}


@pytest.fixture(scope="module")
def exposed(scraped: Mapping[str, dict[str, Metric]]) -> Exposed:
    """All metrics of all services, as they are scraped, those of our connector in vLLM, two of
    vLLM itself, and Prometheus' own.
    """
    found: Exposed = {name: set() for name in OF_VLLM | {"up"}}
    for metrics in scraped.values():
        for name, metric in metrics.items():
            for suffix in ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",):
                found.setdefault(f"{name}{suffix}", set()).update(metric.labels or ())
    with imported_connector():
        from lmcache_core.integrations.vllm import stats

        return found | {f"{stats.PROMETHEUS_PREFIX}{name}": set() for name in stats.DESCRIBED}


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """Everything monitored, one model."""
    return chart.render(VALUES)


def alerts(rendering: Rendering) -> list[Manifest]:
    return [
        alert
        for rule in rendering.of_kind("PrometheusRule")
        for group in rule["spec"]["groups"]
        for alert in group["rules"]
    ]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [
        without_variables(target["expr"])
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def check_expression(expression: str, exposed: Exposed) -> None:
    """It is PromQL, of this release alone, about metrics and labels that exist."""
    found = selectors(expression)
    assert found, f"{expression} asks for nothing"
    for one in found:
        assert one.metric in exposed, f"no service exposes {one.metric}: {expression}"
        assert one.matchers["lmcache_release"] == "inference/cache", expression
        labels = exposed[one.metric]
        if labels:
            assert set(one.matchers) - OF_TARGETS <= labels, (
                f"{one.metric} has the labels {labels}: {expression}"
            )
        for pattern in one.matchers.get("event", TIER_EVENTS[0]).split("|"):
            assert any(re.fullmatch(pattern, event) for event in TIER_EVENTS), (
                f"no tier reports {pattern}: {expression}"
            )


@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize("encrypted", [False, True])
def test_monitors_find_pods_and_ports(chart: Chart, encrypted: bool, mutual: bool) -> None:
    tls = TLS | {"tls.mutual": mutual} if encrypted else {}
    rendering = chart.render(VALUES | tls)
    monitors = {one["metadata"]["name"]: one["spec"] for one in rendering.of_kind("PodMonitor")}
    monitored = {one["metadata"]["name"] for one in rendering.workloads()}
    assert set(monitors) == monitored - {"cache-lmcache-redis"} | {"cache-lmcache-injected"}
    for workload in rendering.workloads():
        name = workload["metadata"]["name"]
        if name not in monitors:
            continue
        template = workload["spec"]["template"]
        selected = monitors[name]["selector"]["matchLabels"]
        assert selected.items() <= template["metadata"]["labels"].items()
        containers = containers_of(template["spec"])
        listed = [port for one in containers for port in one.get("ports", [])]
        ports = {port["name"]: port["containerPort"] for port in listed}
        for endpoint in monitors[name]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports
            is_https = (
                encrypted and not mutual and "-vllm-" not in name and not name.endswith("-webhook")
            )
            assert endpoint.get("scheme", "http") == ("https" if is_https else "http")
            if is_https:
                assert endpoint["tlsConfig"]["serverName"] == f"{name}.inference.svc"
                ca = {"secret": {"name": "certificates", "key": "ca.crt"}}
                assert endpoint["tlsConfig"]["ca"] == ca
            opened = {
                port["port"]
                for policy in rendering.of_kind("NetworkPolicy")
                if is_of(policy, template)
                for rule in policy["spec"].get("ingress", ())
                if rule.get("from") == MONITORING
                for port in rule["ports"]
            }
            assert ports[endpoint["port"]] in opened, f"policies keep Prometheus from {name}"


def test_targets_are_labelled_as_expressions_want(rendering: Rendering) -> None:
    components = {"cache-lmcache-injected": "vllm", "cache-lmcache-vllm-tiny": "vllm"}
    for monitor in rendering.of_kind("PodMonitor"):
        name = monitor["metadata"]["name"]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            given = {one["targetLabel"]: one["replacement"] for one in endpoint["relabelings"]}
            component = components.get(name, name.removeprefix("cache-lmcache-"))
            labels = {"lmcache_release": "inference/cache", "lmcache_component": component}
            if "-vllm-" in name:
                labels["lmcache_model"] = "tiny"
            assert given == labels


def test_injected_pods_are_found_in_every_namespace(chart: Chart) -> None:
    spec = chart.render(VALUES).get("PodMonitor", "injected")["spec"]
    assert spec["namespaceSelector"] == {"any": True}
    assert spec["selector"] == {"matchLabels": {INJECTED: "true"}}
    assert [one["port"] for one in spec["podMetricsEndpoints"]] == ["lmcache-health"]
    without = chart.render(VALUES | {"webhook.enabled": False})
    assert "injected" not in without.by_name("PodMonitor")


def is_of(policy: Manifest, template: Manifest) -> bool:
    selected: dict[str, str] = policy["spec"]["podSelector"]["matchLabels"]
    return selected.items() <= template["metadata"]["labels"].items()


def test_vllm_over_https_is_asked_so(chart: Chart) -> None:
    rendering = chart.render(
        VALUES | {"models": {"tiny": MODEL | {"tls": {"existingSecret": "front-door"}}}}
    )
    listed = rendering.get("PodMonitor", "vllm-tiny")["spec"]["podMetricsEndpoints"]
    endpoints = {one["port"]: one for one in listed}
    assert endpoints["http"]["scheme"] == "https"
    assert "scheme" not in endpoints["sidecar-health"]


def test_alerts_ask_for_what_is_exposed(rendering: Rendering, exposed: Exposed) -> None:
    names = [alert["alert"] for alert in alerts(rendering)]
    assert len(names) == len(set(names)) >= 20
    for alert in alerts(rendering):
        check_expression(alert["expr"], exposed)
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        assert "$release" not in json.dumps(alert)


def test_every_alert_has_a_runbook_and_each_runbook_an_alert(rendering: Rendering) -> None:
    headings = re.findall(r"^#+ (Lmcache\w+)$", RUNBOOKS.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(headings) == {alert["alert"] for alert in alerts(rendering)}
    for alert in alerts(rendering):
        url = f"docs/runbooks.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == url


def test_single_alerts_can_be_left_out_and_all_labelled(chart: Chart) -> None:
    given = VALUES | {
        "monitoring.rules.disabled": ["LmcacheLookupSlow"],
        "monitoring.rules.alertLabels": {"team": "inference"},
        "monitoring.rules.runbookUrl": "https://example.com/runbooks.html",
        "monitoring.rules.labels": {"release": "prometheus"},
    }
    rendering = chart.render(given)
    found = {alert["alert"]: alert for alert in alerts(rendering)}
    assert "LmcacheLookupSlow" not in found
    assert found["LmcacheTargetDown"]["labels"] == {"severity": "warning", "team": "inference"}
    url = found["LmcacheTargetDown"]["annotations"]["runbook_url"]
    assert url == "https://example.com/runbooks.html#lmcachetargetdown"
    assert rendering.of_kind("PrometheusRule")[0]["metadata"]["labels"]["release"] == "prometheus"


def test_dashboards_are_config_maps(rendering: Rendering) -> None:
    found = [
        one
        for one in rendering.of_kind("ConfigMap")
        if one["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    assert len(found) == len(DASHBOARDS) == 4
    for one in found:
        ((name, text),) = one["data"].items()
        file = next(path for path in DASHBOARDS if name == f"lmcache-{path.name}")
        assert json.loads(text) == json.loads(file.read_bytes())
        assert len(text) < 100_000


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_ask_for_what_is_exposed(path: Any, exposed: Exposed) -> None:
    dashboard = json.loads(path.read_bytes())
    for expression in expressions(dashboard):
        check_expression(expression, exposed)


def unit_of(expression: str) -> str:
    """What a panel of that expression must show, by the names of its metrics."""
    names = [
        one.metric.removesuffix("_total").removesuffix("_bucket")
        for one in selectors(without_variables(expression))
    ]
    measured = {name.rpartition("_")[2] for name in names}
    if " / " in expression:
        return "percentunit" if len(measured) == 1 else "s"
    if measured == {"bytes"}:
        return "Bps" if "rate(" in expression else "bytes"
    if names[0].startswith("lmcache_http_requests"):
        return "reqps"
    return (
        {"seconds": "s", "error": "percentunit"}.get(measured.pop(), "short")
        if "cpu" not in names[0]
        else "short"
    )


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_well_made(path: Any) -> None:
    """Grafana shows panels that overlap one over the other, and takes queries of one name for
    the same.
    """
    dashboard = json.loads(path.read_bytes())
    assert dashboard["uid"] == f"lmcache-{path.stem}"
    assert "id" not in dashboard
    assert dashboard["schemaVersion"] >= 36, (
        "older ones name data sources instead of referring to them"
    )
    assert not re.search(
        r'"uid": "(?!\$\{datasource\}|lmcache-)', path.read_text(encoding="utf-8")
    ), "a data source of one Grafana alone"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "release"}
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        rows = range(place["y"], place["y"] + place["h"])
        own = set(itertools.product(columns, rows))
        assert max(x for x, _ in own) < 24
        assert not own & cells, panel["title"]
        cells |= own
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(identities) == len(set(identities))
    for panel in panels(dashboard):
        names = [target["refId"] for target in panel["targets"]]
        assert len(names) == len(set(names))
        assert panel["title"]
        for target in panel["targets"]:
            unit = panel["fieldConfig"]["defaults"]["unit"]
            assert unit == unit_of(target["expr"]), panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
