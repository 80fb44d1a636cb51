"""Models: a map that overlays can change, their weights, GPUs and token, and their callers' way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import MODEL, MODELS, MONITORING, both_helms

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.conftest import Chart

NAME = "cache-lmcache-vllm-tiny"


@both_helms
def test_an_overlay_changes_one_model_and_removes_another(
    chart: Chart, tmp_path: Path, helm: str
) -> None:
    base, overlay = tmp_path / "base.yaml", tmp_path / "overlay.yaml"
    base.write_text("models: {one: {model: a/one, replicaCount: 2}, two: {model: a/two}}")
    overlay.write_text("models: {one: {replicaCount: 3}, two: null}")
    rendering = chart.render(None, base, overlay, helm=helm)
    (model,) = (
        one for one in rendering.of_kind("Deployment") if "-vllm-" in one["metadata"]["name"]
    )
    assert model["spec"]["replicas"] == 3
    assert "a/one" in rendering.container("vllm")["args"]
    assert "a/two" not in rendering.text
    none = chart.render({"models.one": None, "models.two": None}, base, helm=helm)
    assert "vllm" not in {name.rpartition("/")[2] for name, _ in none.containers()}
    assert "vllm" not in none.by_name("NetworkPolicy")


def test_the_label_of_a_model_is_of_the_charts_domain(chart: Chart) -> None:
    deployment = chart.render(MODELS).get("Deployment", "vllm-tiny")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    domains = {name.partition("/")[0] for name in labels}
    assert domains == {"app.kubernetes.io", "lmcache.io"}
    assert labels["lmcache.io/model"] == "tiny"


@pytest.mark.parametrize("name", ["8", "1e3", "true", "null"])
def test_a_model_may_be_named_like_a_number_or_a_constant(chart: Chart, name: str) -> None:
    monitored = {"monitoring.podMonitors.enabled": True, "networkPolicy.metricsFrom": MONITORING}
    rendering = chart.render(monitored | {"models": {name: MODEL}})
    pods = rendering.get("Deployment", f"vllm-{name}")["spec"]["template"]["metadata"]
    assert pods["labels"]["lmcache.io/model"] == name
    monitor = rendering.by_name("PodMonitor")[f"vllm-{name}"]
    assert monitor["selector"]["matchLabels"]["lmcache.io/model"] == name
    for endpoint in monitor["podMetricsEndpoints"]:
        assert {"targetLabel": "lmcache_model", "replacement": name} in endpoint["relabelings"]


def test_a_token_of_hugging_face_comes_from_a_secret(chart: Chart) -> None:
    hub = {"existingSecret": "hub", "existingSecretKey": "hf"}
    env = chart.render({"models.tiny": MODEL | {"huggingface": hub}}).container("vllm")["env"]
    (token,) = (one for one in env if one["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "hf"}}
    assert "HF_TOKEN" not in chart.render(MODELS).text


def test_a_model_is_split_over_gpus(chart: Chart) -> None:
    args = chart.render({"models.tiny": MODEL | {"tensorParallelSize": 2}}).container("vllm")[
        "args"
    ]
    assert args[args.index("--tensor-parallel-size") + 1] == "2"
    assert "--tensor-parallel-size" not in chart.render(MODELS).container("vllm")["args"]


@pytest.mark.parametrize(
    ("weights", "home"),
    [
        ({}, {"emptyDir": {"sizeLimit": "100Gi"}}),
        ({"size": "30Gi"}, {"emptyDir": {"sizeLimit": "30Gi"}}),
        ({"existingClaim": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}),
        ({"createClaim": True}, {"persistentVolumeClaim": {"claimName": NAME}}),
    ],
)
def test_weights_have_a_volume(
    chart: Chart, weights: dict[str, object], home: dict[str, object]
) -> None:
    rendering = chart.render({"models.tiny": MODEL | {"weights": weights}})
    (volume,) = (one for one in rendering.pod("vllm-tiny")["volumes"] if one["name"] == "home")
    assert volume == {"name": "home"} | home
    claims = rendering.of_kind("PersistentVolumeClaim")
    assert [one["metadata"]["name"] for one in claims] == (
        [NAME] if "createClaim" in weights else []
    )


def test_a_claim_follows_its_values(chart: Chart) -> None:
    spec = chart.case("gateway").get("PersistentVolumeClaim", "vllm-plain")["spec"]
    assert spec == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "shared",
        "resources": {"requests": {"storage": "20Gi"}},
    }


def test_the_service_follows_its_values(chart: Chart) -> None:
    service = {"type": "LoadBalancer", "annotations": {"a": "b"}, "labels": {"c": "d"}}
    found = chart.render({"models.tiny": MODEL | {"service": service}}).get("Service", "vllm-tiny")
    assert found["spec"]["type"] == "LoadBalancer"
    assert found["metadata"]["annotations"] == {"a": "b"}
    assert found["metadata"]["labels"].items() >= {"c": "d", "lmcache.io/model": "tiny"}.items()
    assert chart.render(MODELS).get("Service", "vllm-tiny")["spec"]["type"] == "ClusterIP"


def test_a_gateway_leads_to_the_service_or_to_the_pool(chart: Chart) -> None:
    rendering = chart.case("gateway")
    routes = rendering.by_name("HTTPRoute")
    (plain,) = routes["vllm-plain"]["rules"]
    (backend,) = plain["backendRefs"]
    service = rendering.get("Service", backend["name"].removeprefix("cache-lmcache-"))["spec"]
    assert backend["port"] in {port["port"] for port in service["ports"]}
    assert routes["vllm-plain"]["hostnames"] == ["plain.example.com"]
    assert plain["timeouts"] == {"request": "10m"}
    (pooled,) = routes["vllm-pooled"]["rules"]
    pools = {one["metadata"]["name"]: one["spec"] for one in rendering.of_kind("InferencePool")}
    assert set(pools) == {pooled["backendRefs"][0]["name"]} == {"cache-lmcache-vllm-pooled"}
    (pool,) = pools.values()
    pods = rendering.get("Deployment", "vllm-pooled")["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    ports = {one["name"]: one["containerPort"] for one in pods["spec"]["containers"][0]["ports"]}
    assert [port["number"] for port in pool["targetPorts"]] == [ports["http"]]
    off = chart.render(MODELS)
    assert not off.of_kind("HTTPRoute", "InferencePool", "PersistentVolumeClaim")


@both_helms
def test_a_model_overrides_its_defaults_with_what_is_empty(chart: Chart, helm: str) -> None:
    defaults = {"replicaCount": 2, "extraArgs": ["--seed=1"], "connector": {"enabled": True}}
    own = {"replicaCount": 0, "extraArgs": [], "connector": {"enabled": False}}
    values = {f"modelDefaults.{name}": value for name, value in defaults.items()}
    rendering = chart.render(values | {"models.tiny": MODEL | own}, helm=helm)
    assert rendering.get("Deployment", "vllm-tiny")["spec"]["replicas"] == 0
    args = rendering.container("vllm")["args"]
    assert not {"--seed=1", "--kv-transfer-config"} & set(args)
