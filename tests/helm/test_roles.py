"""A model with prefill and decode: two Deployments that scale, are selected and are configured apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import MODEL, both_helms, option_of
from tests.helm.queries import selectors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.conftest import Chart, Manifest, Rendering

ROLES = ("prefill", "decode")
KINDS = ("Deployment", "ConfigMap", "Service", "ServiceAccount", "PodDisruptionBudget")
LABEL = "llm-d.ai/role"
"""By which llm-d's router tells the pods of an InferencePool apart."""


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """One model with both roles."""
    return chart.case("roles")


def deployment(rendering: Rendering, role: str) -> Manifest:
    return rendering.get("Deployment", f"vllm-llama-{role}")


def labels_of(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def test_each_role_has_what_a_model_has(chart: Chart, rendering: Rendering) -> None:
    expected = {f"cache-lmcache-vllm-llama-{role}" for role in ROLES}
    for kind in (*KINDS, "PodMonitor"):
        found = {one["metadata"]["name"] for one in rendering.of_kind(kind)}
        assert {name for name in found if "-vllm-" in name} == expected, kind
    plain, prefill, decode = (
        [container["name"] for container in (*pod["initContainers"], *pod["containers"])]
        for pod in (
            chart.render({"models.tiny": MODEL}).pod("vllm-tiny"),
            *(rendering.pod(f"vllm-llama-{role}") for role in ROLES),
        )
    )
    assert plain == prefill == decode


@both_helms
def test_values_of_a_role_are_laid_over_those_of_the_model(chart: Chart, helm: str) -> None:
    rendering = chart.case("roles", helm=helm)
    prefill, decode = (rendering.pod(f"vllm-llama-{role}") for role in ROLES)
    assert prefill["nodeSelector"] == {"pool": "gpu", "gpu": "h200"}, "maps are merged"
    assert decode["nodeSelector"] == {"pool": "gpu"}
    extra = [pod["containers"][0]["args"][-2:] for pod in (prefill, decode)]
    assert extra == [["--max-num-batched-tokens", "16384"], ["--max-model-len", "32768"]]
    arenas = [rendering.config(f"vllm-llama-{role}")["arena_gb"] for role in ROLES]
    assert arenas == [64, chart.render({"models.tiny": MODEL}).config("vllm-tiny")["arena_gb"]]


def test_vllm_learns_its_role(rendering: Rendering) -> None:
    producer, consumer = (
        option_of(rendering.pod(f"vllm-llama-{role}")["containers"][0], "--kv-transfer-config")
        for role in ROLES
    )
    roles = [config.pop("kv_role") for config in (producer, consumer)]
    assert roles == ["kv_producer", "kv_consumer"]
    assert producer == consumer, "engines with other options may find nothing of each other"


def test_a_router_finds_the_pods_of_each_role(rendering: Rendering) -> None:
    for role in ROLES:
        found = deployment(rendering, role)
        assert labels_of(found)[LABEL] == role
        selected = found["spec"]["selector"]["matchLabels"]
        assert LABEL not in selected, "a label for others must not fix the Deployment"
        assert (selected["lmcache.io/model"], selected["lmcache.io/role"]) == ("llama", role)


def test_selectors_of_one_role_leave_the_other_out(rendering: Rendering) -> None:
    prefill, decode = (labels_of(deployment(rendering, role)) for role in ROLES)
    selectors = [
        one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
        for one in rendering.of_kind("Deployment", "Service", "PodDisruptionBudget", "PodMonitor")
        if one["metadata"]["name"].endswith("-llama-decode")
    ]
    assert len(selectors) == 4
    for selector in selectors:
        assert selector.items() <= decode.items()
        assert not selector.items() <= prefill.items()


def test_each_role_has_its_own_number_of_pods(rendering: Rendering) -> None:
    assert deployment(rendering, "prefill")["spec"]["replicas"] == 2
    ((name, scaled),) = rendering.by_name("ScaledObject").items()
    assert name == "vllm-llama-decode"
    assert scaled["scaleTargetRef"]["name"] == "cache-lmcache-vllm-llama-decode"
    (trigger,) = scaled["triggers"]
    (asked,) = selectors(trigger["metadata"]["query"])
    assert {"lmcache_model": "llama", "lmcache_role": "decode"}.items() <= asked.matchers.items()
    endpoints = rendering.by_name("PodMonitor")["vllm-llama-decode"]["podMetricsEndpoints"]
    for endpoint in endpoints:
        relabelled = {one["targetLabel"]: one["replacement"] for one in endpoint["relabelings"]}
        assert relabelled.items() >= {"lmcache_model": "llama", "lmcache_role": "decode"}.items()


def test_numbers_are_left_to_kubectl_scale(chart: Chart) -> None:
    rendering = chart.render({"models.llama": MODEL | {"prefill": {}, "decode": {}}})
    assert all("replicas" not in deployment(rendering, role)["spec"] for role in ROLES)


def test_route_and_pool_lead_to_both_roles(rendering: Rendering) -> None:
    ((_, pool),) = rendering.by_name("InferencePool").items()
    for role in ROLES:
        labels = labels_of(deployment(rendering, role))
        assert pool["selector"]["matchLabels"].items() <= labels.items()
    ((_, route),) = rendering.by_name("HTTPRoute").items()
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend["kind"] == "InferencePool"
    assert backend["name"] == "cache-lmcache-vllm-llama"


@both_helms
def test_an_overlay_takes_the_roles_away(chart: Chart, tmp_path: Path, helm: str) -> None:
    base, overlay = tmp_path / "base.yaml", tmp_path / "overlay.yaml"
    base.write_text("models: {llama: {model: a/b, prefill: {replicaCount: 2}, decode: {}}}")
    overlay.write_text("models: {llama: {prefill: null, decode: null, replicaCount: 3}}")
    rendering = chart.render(None, base, overlay, helm=helm)
    assert rendering.get("Deployment", "vllm-llama")["spec"]["replicas"] == 3
    assert LABEL not in rendering.text


def test_one_service_of_all_sidecars_leads_to_both_roles(rendering: Rendering) -> None:
    selected = rendering.get("Service", "sidecars")["spec"]["selector"]
    assert all(selected.items() <= labels_of(deployment(rendering, role)).items() for role in ROLES)
