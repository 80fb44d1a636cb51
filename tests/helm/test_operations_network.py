"""Everything is denied to every pod of the release, jobs and tests too; what is open leads to
what listens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

ALL: Manifest = {
    "models": [{"name": "tiny", "model": "example/tiny-llama"}],
    "webhook.enabled": True,
}


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """Whatever there can be."""
    return chart.render(ALL)


def templates(rendering: Rendering) -> dict[str, Manifest]:
    """Every pod that can come of the rendering: its metadata and specification, by the object
    that it comes of.
    """
    found = {f"Pod/{one['metadata']['name']}": one for one in rendering.of_kind("Pod")}
    for kind in ("Deployment", "StatefulSet", "Job"):
        found |= {
            f"{kind}/{one['metadata']['name']}": one["spec"]["template"]
            for one in rendering.of_kind(kind)
        }
    for one in rendering.of_kind("CronJob"):
        found[f"CronJob/{one['metadata']['name']}"] = one["spec"]["jobTemplate"]["spec"]["template"]
    return found


def selects(policy: Manifest, template: Manifest) -> bool:
    selected: dict[str, str] = policy["spec"]["podSelector"].get("matchLabels", {})
    return selected.items() <= template["metadata"]["labels"].items()


def denying(rendering: Rendering) -> Manifest:
    return rendering.get("NetworkPolicy", "default-deny")


def test_everything_is_denied_to_every_pod(rendering: Rendering) -> None:
    policy = denying(rendering)
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(policy["spec"])
    found = templates(rendering)
    assert {name.split("/")[0] for name in found} == {
        "Pod",
        "Deployment",
        "StatefulSet",
        "Job",
        "CronJob",
    }
    for name, template in found.items():
        assert selects(policy, template), name


def test_a_release_denies_nothing_to_others(rendering: Rendering) -> None:
    selected = denying(rendering)["spec"]["podSelector"]["matchLabels"]
    assert selected == {"app.kubernetes.io/name": "lmcache", "app.kubernetes.io/instance": "cache"}


def test_every_pod_has_a_policy_that_lets_it_do_its_work(rendering: Rendering) -> None:
    """But for the one that denies, each pod is under another, which allows something or says why
    not.
    """
    for name, template in templates(rendering).items():
        others = [
            one
            for one in rendering.of_kind("NetworkPolicy")
            if selects(one, template) and one is not denying(rendering)
        ]
        assert others, f"{name} can do nothing"


def test_what_is_open_listens(rendering: Rendering) -> None:
    """A port that nobody opens is a rule that was forgotten."""
    for policy in rendering.of_kind("NetworkPolicy"):
        selected = [
            template for template in templates(rendering).values() if selects(policy, template)
        ]
        containers = [
            one
            for pod in selected
            for one in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        ]
        opened = {port["containerPort"] for one in containers for port in one.get("ports", [])}
        allowed = {
            port["port"]
            for rule in policy["spec"].get("ingress", [])
            for port in rule.get("ports", [])
        }
        assert allowed <= opened, policy["metadata"]["name"]


def test_what_is_let_out_is_let_in(rendering: Rendering) -> None:
    """Each edge between pods of the release is in a policy at either end."""
    pods = templates(rendering)
    policies = rendering.of_kind("NetworkPolicy")

    def edges(direction: str, peers: str) -> set[tuple[str, str, int]]:
        return {
            (own, other, port["port"])
            for policy in policies
            for own, template in pods.items()
            if selects(policy, template)
            for rule in policy["spec"].get(direction, [])
            for peer in rule.get(peers, [])
            if "namespaceSelector" not in peer and peer.get("podSelector")
            for other, there in pods.items()
            if peer["podSelector"]["matchLabels"].items() <= there["metadata"]["labels"].items()
            for port in rule["ports"]
        }

    out = edges("egress", "to")
    assert out
    assert out == {(source, target, port) for target, source, port in edges("ingress", "from")}


@pytest.mark.parametrize("ports", [[], None], ids=["empty", "null"])
def test_no_ports_are_no_ways_out(chart: Chart, ports: list[int] | None) -> None:
    """A rule without ports would be one about all ports, to anywhere."""
    external = {
        "redis.enabled": False,
        "externalRedis.url": "redis://r:6379",
        "externalRedis.ports": ports,
    }
    values = external | {"networkPolicy.dnsPorts": ports, "networkPolicy.apiServerPorts": ports}
    for policy in chart.render(ALL | values).of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("egress") or []:
            assert rule["ports"], policy["metadata"]["name"]


def test_further_ways_out_are_every_pods(chart: Chart) -> None:
    rule = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracing"}}}],
        "ports": [{"port": 4318}],
    }
    assert denying(chart.render(ALL | {"networkPolicy.extraEgress": [rule]}))["spec"]["egress"] == [
        rule
    ]


def test_policies_can_be_left_out(chart: Chart) -> None:
    assert chart.render(ALL | {"networkPolicy.enabled": False}).of_kind("NetworkPolicy") == []
