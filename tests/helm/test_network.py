"""NetworkPolicies: every pod is under one, and the open edges are exactly the needed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

Edge = tuple[str, str, int]
COMPONENT = "app.kubernetes.io/component"
NEEDED: set[Edge] = {
    ("vllm", "vllm", 65433),
    ("vllm", "storage", 65432),
    ("vllm", "lookup", 8081),
    ("vllm", "broker", 8082),
    ("storage", "storage", 65432),
    ("storage", "lookup", 8081),
    ("storage", "broker", 8082),
    ("lookup", "redis", 6379),
    ("broker", "redis", 6379),
}
MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def policies(rendering: Rendering) -> dict[str, Manifest]:
    """Those of the components, not the one that denies everything, nor those of `helm test`,
    which have a test of their own.
    """
    found = {one["metadata"]["name"]: one for one in rendering.of_kind("NetworkPolicy")}
    labelled = {name: one["metadata"]["labels"][COMPONENT] for name, one in found.items()}
    return {
        labelled[name]: one["spec"]
        for name, one in found.items()
        if labelled[name] not in ("default-deny", "release-test")
    }


def component(peer: Manifest) -> str | None:
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    return labels.get(COMPONENT) if "namespaceSelector" not in peer else None


def egress_edges(rendering: Rendering) -> set[Edge]:
    return {
        (source, target, port["port"])
        for source, spec in policies(rendering).items()
        for rule in spec["egress"]
        for peer in rule.get("to", [])
        for port in rule["ports"]
        if (target := component(peer))
    }


def ingress_edges(rendering: Rendering) -> set[Edge]:
    return {
        (source, target, port["port"])
        for target, spec in policies(rendering).items()
        for rule in spec["ingress"]
        for peer in rule["from"]
        for port in rule["ports"]
        if (source := component(peer))
    }


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """Everything, with two models."""
    return chart.render(None, chart.path / "ci" / "models-values.yaml")


def test_the_open_edges_are_the_needed_ones(rendering: Rendering) -> None:
    assert egress_edges(rendering) == NEEDED
    assert ingress_edges(rendering) == NEEDED


def test_every_pod_is_under_a_policy_in_both_directions(rendering: Rendering) -> None:
    selectors = [
        spec["podSelector"]["matchLabels"].items() for spec in policies(rendering).values()
    ]
    for workload in rendering.workloads():
        labels = workload["spec"]["template"]["metadata"]["labels"].items()
        assert any(selector <= labels for selector in selectors), workload["metadata"]["name"]
    for spec in policies(rendering).values():
        assert spec["policyTypes"] == ["Ingress", "Egress"]


def test_edges_lead_to_ports_that_containers_open(rendering: Rendering) -> None:
    opened: dict[str, set[int]] = {}
    for workload in rendering.workloads():
        pod = workload["spec"]["template"]["spec"]
        ports = opened.setdefault(workload["metadata"]["labels"][COMPONENT], set())
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            ports |= {port["containerPort"] for port in container.get("ports", [])}
    assert all(port in opened[target] for _, target, port in NEEDED)


def test_rules_without_a_peer_are_names_weights_the_kubernetes_api_and_nothing_else(
    rendering: Rendering,
) -> None:
    for name, spec in policies(rendering).items():
        assert all(rule["from"] for rule in spec["ingress"])
        anywhere = {
            port["port"] for rule in spec["egress"] if "to" not in rule for port in rule["ports"]
        }
        assert anywhere == {"redis": set(), "vllm": {53, 443}, "broker": {53, 443, 6443}}.get(
            name, {53}
        )


def test_clients_are_the_namespace_unless_named(chart: Chart, rendering: Rendering) -> None:
    model = [{"name": "tiny", "model": "example/tiny-llama"}]
    assert policies(rendering)["vllm"]["ingress"][0]["from"] == [{"podSelector": {}}]
    named = chart.render({"models": model, "networkPolicy.clientsFrom": MONITORING})
    assert policies(named)["vllm"]["ingress"][0]["from"] == MONITORING


def test_metrics_are_for_those_named(chart: Chart, rendering: Rendering) -> None:
    assert all(
        MONITORING not in [rule["from"] for rule in spec["ingress"]]
        for spec in policies(rendering).values()
    )
    scraped = chart.render(
        {"models": [{"name": "tiny", "model": "m"}], "networkPolicy.metricsFrom": MONITORING}
    )
    ports = {
        name: {
            port["port"]
            for rule in spec["ingress"]
            if rule["from"] == MONITORING
            for port in rule["ports"]
        }
        for name, spec in policies(scraped).items()
    }
    assert ports == {
        "vllm": {8000, 8084},
        "storage": {8080},
        "lookup": {8081},
        "broker": {8082},
        "redis": set(),
    }


def test_what_is_off_has_no_edge(chart: Chart) -> None:
    rendering = chart.render(
        {"broker.enabled": False, "lookup.enabled": False, "redis.enabled": False}
    )
    assert set(policies(rendering)) == {"storage"}
    assert egress_edges(rendering) == {("storage", "storage", 65432)}


def test_an_external_redis_is_reached_on_its_ports(chart: Chart) -> None:
    rendering = chart.render(None, chart.path / "ci" / "external-redis-values.yaml")
    for name in ("lookup", "broker"):
        assert {"ports": [{"port": 6380, "protocol": "TCP"}]} in policies(rendering)[name]["egress"]


def test_without_discovery_the_broker_does_not_reach_the_kubernetes_api(chart: Chart) -> None:
    spec = policies(chart.render({"broker.discovery.enabled": False}))["broker"]
    assert {
        port["port"] for rule in spec["egress"] if "to" not in rule for port in rule["ports"]
    } == {53}


def test_lmcache_clients_reach_their_port_and_nothing_else(chart: Chart) -> None:
    compat = {"storage.compat.enabled": True, "storage.compat.clientsFrom": MONITORING}
    rules = [
        rule
        for rule in policies(chart.render(compat))["storage"]["ingress"]
        if rule["from"] == MONITORING
    ]
    assert [rule["ports"] for rule in rules] == [[{"port": 65434, "protocol": "TCP"}]]
    assert "65434" not in chart.render().text


def test_policies_can_be_left_out(chart: Chart) -> None:
    assert policies(chart.render({"networkPolicy.enabled": False})) == {}
