"""NetworkPolicies: everything is denied to every pod of the release, jobs and tests too, and the
open edges are exactly the needed ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import COMPONENT, MODELS, MONITORING, MUTUAL, containers_of

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

Edge = tuple[str, str, int]
ALL: Manifest = MODELS | {"webhook.enabled": True}
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
OF_THE_TEST: set[Edge] = {
    ("release-test", "storage", 8080),
    ("release-test", "storage", 65432),
    ("release-test", "lookup", 8081),
    ("release-test", "broker", 8082),
}
OF_THE_CHECK: Edge = ("webhook-check", "webhook", 8443)
"""Its other end is open to all, since no selector matches the API server."""


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """Whatever there can be."""
    return chart.render(ALL)


def templates(rendering: Rendering) -> dict[str, Manifest]:
    """Every pod that can come of the rendering, by the object that it comes of."""
    found = {f"Pod/{one['metadata']['name']}": one for one in rendering.of_kind("Pod")}
    for one in rendering.workloads():
        found[f"{one['kind']}/{one['metadata']['name']}"] = one["spec"]["template"]
    return found


def selects(policy: Manifest, template: Manifest) -> bool:
    selected: dict[str, str] = policy["podSelector"].get("matchLabels", {})
    return selected.items() <= template["metadata"]["labels"].items()


def policies(rendering: Rendering) -> dict[str, Manifest]:
    """By component; without that which denies everything, and those of `helm test`."""
    return {
        one["metadata"]["labels"][COMPONENT]: one["spec"]
        for one in rendering.of_kind("NetworkPolicy")
        if one["metadata"]["labels"][COMPONENT] not in ("default-deny", "release-test")
        and not one["metadata"]["name"].endswith("-injected")
    }


def edges(rendering: Rendering, direction: str, peers: str) -> set[Edge]:
    """Ends of the connections between pods of the release that rules let through."""
    found = set()
    for one in rendering.of_kind("NetworkPolicy"):
        own = one["spec"]["podSelector"]["matchLabels"].get(COMPONENT)
        for rule in one["spec"].get(direction) or []:
            for peer in rule.get(peers, []):
                other = peer.get("podSelector", {}).get("matchLabels", {}).get(COMPONENT)
                if other and "namespaceSelector" not in peer:
                    pair = (own, other) if direction == "egress" else (other, own)
                    found |= {(*pair, port["port"]) for port in rule["ports"]}
    return found


def ways_out(spec: Manifest) -> set[int]:
    """Ports at which a policy lets its pods reach whatever they like."""
    return {port["port"] for rule in spec["egress"] if "to" not in rule for port in rule["ports"]}


def ports_for(spec: Manifest, peers: list[Manifest]) -> set[int]:
    rules = [rule for rule in spec["ingress"] if rule.get("from") == peers]
    return {port["port"] for rule in rules for port in rule["ports"]}


def test_the_open_edges_are_the_needed_ones(rendering: Rendering) -> None:
    assert edges(rendering, "egress", "to") == NEEDED | OF_THE_TEST | {OF_THE_CHECK}
    assert edges(rendering, "ingress", "from") == NEEDED | OF_THE_TEST


def test_everything_is_denied_to_every_pod_and_each_may_do_its_work(rendering: Rendering) -> None:
    """Each pod is under another policy too, which allows something or says why not."""
    policy = rendering.get("NetworkPolicy", "default-deny")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(policy)
    own = {"app.kubernetes.io/name": "lmcache", "app.kubernetes.io/instance": "cache"}
    assert policy["podSelector"]["matchLabels"] == own, "nothing is denied to others"
    found = templates(rendering)
    kinds = {"Pod", "Deployment", "StatefulSet"}
    assert {name.split("/")[0] for name in found} == kinds
    for name, template in found.items():
        about = [one["spec"] for one in rendering.of_kind("NetworkPolicy")]
        about = [spec for spec in about if selects(spec, template)]
        assert policy in about, name
        assert len(about) > 1, f"{name} can do nothing"
    for component, spec in policies(rendering).items():
        assert spec["policyTypes"] == ["Ingress", "Egress"], component


def test_what_is_open_listens(rendering: Rendering) -> None:
    """A port that no pod listens on needs no rule."""
    for policy in rendering.of_kind("NetworkPolicy"):
        selected = [one for one in templates(rendering).values() if selects(policy["spec"], one)]
        containers = [one for pod in selected for one in containers_of(pod["spec"])]
        opened = {port["containerPort"] for one in containers for port in one.get("ports", [])}
        rules = policy["spec"].get("ingress", [])
        allowed = {port["port"] for rule in rules for port in rule.get("ports", [])}
        assert allowed <= opened, policy["metadata"]["name"]


def test_rules_without_a_peer_are_names_weights_the_kubernetes_api_and_nothing_else(
    chart: Chart,
) -> None:
    for name, spec in policies(chart.case("models")).items():
        assert all(rule["from"] for rule in spec["ingress"])
        own = {"redis": set(), "vllm": {53, 443}, "broker": {53, 443, 6443}}
        assert ways_out(spec) == own.get(name, {53}), name
    without = policies(chart.render({"broker.discovery.enabled": False}))["broker"]
    assert ways_out(without) == {53}, "only discovery asks the Kubernetes API"


@pytest.mark.parametrize("ports", [[], None], ids=["empty", "null"])
def test_no_ports_are_no_ways_out(chart: Chart, ports: list[int] | None) -> None:
    """A rule without ports would be one about all ports, to anywhere."""
    values = {
        "redis.enabled": False,
        "externalRedis.url": "redis://r:6379",
        "externalRedis.ports": ports,
        "networkPolicy.dnsPorts": ports,
        "networkPolicy.apiServerPorts": ports,
    }
    for policy in chart.render(ALL | values).of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("egress") or []:
            assert rule["ports"], policy["metadata"]["name"]


def test_further_ways_out_are_every_pods(chart: Chart) -> None:
    rule = {"to": MONITORING, "ports": [{"port": 4318}]}
    found = chart.render(ALL | {"networkPolicy.extraEgress": [rule]})
    assert found.get("NetworkPolicy", "default-deny")["spec"]["egress"] == [rule]


def test_clients_are_the_namespace_unless_named(chart: Chart, rendering: Rendering) -> None:
    assert policies(rendering)["vllm"]["ingress"][0]["from"] == [{"podSelector": {}}]
    named = chart.render(MODELS | {"networkPolicy.clientsFrom": MONITORING})
    assert policies(named)["vllm"]["ingress"][0]["from"] == MONITORING


@pytest.mark.parametrize("routers", [[], [{"podSelector": {"matchLabels": {"app": "router"}}}]])
def test_events_are_for_the_routers_named(chart: Chart, routers: list[Manifest]) -> None:
    events = {"enabled": True, "port": 6000, "replayPort": 6001, "routersFrom": routers}
    vllm = policies(chart.render(MODELS | {"kvEvents": events}))["vllm"]
    rules = [rule for rule in vllm["ingress"] if {"port": 6000, "protocol": "TCP"} in rule["ports"]]
    assert [rule["from"] for rule in rules] == ([routers] if routers else [])
    assert ports_for(vllm, routers) == ({6000, 6001} if routers else set())


@pytest.mark.parametrize("tls", [None, {}, MUTUAL], ids=["not named", "plain", "mutual"])
def test_metrics_are_for_those_named(chart: Chart, tls: Manifest | None) -> None:
    given = MODELS if tls is None else MODELS | tls | {"networkPolicy.metricsFrom": MONITORING}
    found = policies(chart.render(given))
    ports = {name: ports_for(spec, MONITORING) for name, spec in found.items()}
    plain = {"vllm": {8000, 8084}, "storage": {8080}, "lookup": {8081}, "broker": {8082}}
    open_to: dict[str, set[int]] = {} if tls is None else plain
    if tls:
        open_to = {name: {8000, 8084} if name == "vllm" else {8084} for name in plain}
    assert ports == {name: open_to.get(name, set()) for name in ports}
    assert set(open_to) <= set(ports)


def test_what_is_off_has_no_edge(chart: Chart) -> None:
    off = {f"{name}.enabled": False for name in ("broker", "lookup", "redis", "releaseTest")}
    rendering = chart.render(off)
    assert set(policies(rendering)) == {"storage"}
    assert edges(rendering, "egress", "to") == {("storage", "storage", 65432)}


def test_an_external_redis_is_reached_on_its_ports(chart: Chart) -> None:
    found = policies(chart.case("external-redis"))
    for name in ("lookup", "broker"):
        assert {"ports": [{"port": 6380, "protocol": "TCP"}]} in found[name]["egress"]


def test_lmcache_clients_reach_their_port_and_nothing_else(chart: Chart) -> None:
    compat = {"storage.compat.enabled": True, "storage.compat.clientsFrom": MONITORING}
    assert ports_for(policies(chart.render(compat))["storage"], MONITORING) == {65434}
    assert "65434" not in chart.render().text


def test_policies_can_be_left_out(chart: Chart) -> None:
    assert chart.render(ALL | {"networkPolicy.enabled": False}).of_kind("NetworkPolicy") == []
