"""vLLM uses the cache: what is copied into its pod, what it is told, and that the connector
understands it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from lmcache_core.integrations import vllm_tier
from lmcache_core.integrations.vllm.options import read_options

from tests.helm.conftest import MODEL, MODELS, option_of

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest


def transfer_config(chart: Chart, **model: object) -> Manifest:
    config: Manifest = option_of(pod_of(chart, **model)["containers"][0], "--kv-transfer-config")
    return config


def pod_of(chart: Chart, **model: object) -> Manifest:
    return chart.render({"models": {"tiny": MODEL | model}}).pod("vllm-tiny")


def test_vllm_finds_its_sidecar(chart: Chart) -> None:
    config = transfer_config(chart)
    assert config["kv_load_failure_policy"] == "recompute", "vLLM's own default ends the request"
    sidecar = chart.render(MODELS).config("vllm-tiny")
    assert config["kv_connector_extra_config"] == {"lmcache.sidecar_socket": sidecar["socket_path"]}


def test_options_reach_the_connector(chart: Chart) -> None:
    options = {
        "lmcache.layout": "blocks",
        "lmcache.chunk_size": 512,
        "lmcache.save_decode_cache": True,
    }
    config = transfer_config(chart, connector={"options": options})
    socket = {"lmcache.sidecar_socket": "/run/lmcache/socket/sidecar.sock"}
    assert config["kv_connector_extra_config"] == socket | options
    read = read_options(config["kv_connector_extra_config"], "cuda")
    assert (read.layout, read.engine.chunk_size, read.engine.save_decode_cache) == (
        "blocks",
        512,
        True,
    )
    assert read.engine.sidecar_socket == "/run/lmcache/socket/sidecar.sock"


def test_the_sidecar_behind_vllm_s_own_offloading(chart: Chart) -> None:
    pod = pod_of(chart, connector={"kind": "offloading-tier", "hostMemory": "1Gi"}, shmSize="1Gi")
    config = option_of(pod["containers"][0], "--kv-transfer-config")
    assert config["kv_connector"] == "LMCacheOffloadingConnector"
    extra = config["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["cpu_bytes_to_use"] == 1 << 30
    (tier,) = extra["secondary_tiers"]
    assert tier["sidecar_socket"] == "/run/lmcache/socket/sidecar.sock"
    assert tier["type"] in vllm_tier.__all__
    assert {config["kv_connector_module_path"], tier["module_path"]} == {vllm_tier.__name__}
    (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert int(shm["emptyDir"]["sizeLimit"]) == 2 << 30, "vLLM keeps its host memory there"


def test_vllm_publishes_events_of_the_sidecar_where_routers_read_them(chart: Chart) -> None:
    vllm = chart.case("gateway").pod("vllm-pooled")["containers"][0]
    assert option_of(vllm, "--kv-events-config") == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "kv@$(POD_IP):8000@example/tiny-llama",
    }
    assert {"name": "kv-events", "containerPort": 5557} in vllm["ports"]
    assert {"name": "kv-replay", "containerPort": 5558} in vllm["ports"]
    assert {one["name"]: one.get("valueFrom") for one in vllm["env"]}["POD_IP"] == {
        "fieldRef": {"fieldPath": "status.podIP"}
    }, "Kubernetes fills in the topic"
    config = option_of(vllm, "--kv-transfer-config")
    assert read_options(config["kv_connector_extra_config"], "cuda").kv_events
    assert "kv-events" not in json.dumps(pod_of(chart))


def test_a_model_may_leave_the_events_of_its_sidecar_out(chart: Chart) -> None:
    without = {"connector": {"options": {"lmcache.kv_events": False}}}
    tier = {"connector": {"kind": "offloading-tier"}}
    models = {"plain": MODEL | without, "tier": MODEL | tier}
    rendering = chart.render({"kvEvents.enabled": True, "models": models})
    plain, behind = (
        option_of(rendering.pod(f"vllm-{name}")["containers"][0], "--kv-transfer-config")
        for name in models
    )
    assert not read_options(plain["kv_connector_extra_config"], "cuda").kv_events
    extra = behind["kv_connector_extra_config"]
    assert extra["self_describing_kv_events"] is True, "else vLLM's have no tokens"
    assert extra["secondary_tiers"][0]["enable_kv_events"] is True


def test_the_connector_is_copied_in_and_found(chart: Chart) -> None:
    pod = pod_of(chart, connector={"pythonPath": "/extra"})
    payload, vllm = pod["initContainers"][0], pod["containers"][0]
    assert payload["command"] == ["/payload/install", "/opt/lmcache"]
    assert payload["volumeMounts"] == [{"name": "payload", "mountPath": "/opt/lmcache"}]
    mount = {"name": "payload", "mountPath": "/opt/lmcache", "readOnly": True}
    assert mount in vllm["volumeMounts"]
    assert {"name": "PYTHONPATH", "value": "/extra:/opt/lmcache/python"} in vllm["env"]
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "payload")
    assert "sizeLimit" in volume["emptyDir"]


def test_the_connector_can_be_left_out(chart: Chart) -> None:
    pod = pod_of(chart, connector={"enabled": False})
    assert [container["name"] for container in pod["initContainers"]] == ["sidecar"]
    assert "--kv-transfer-config" not in pod["containers"][0]["args"]
    assert "payload" not in json.dumps(pod)
    assert not any(one["name"] == "PYTHONPATH" for one in pod["containers"][0]["env"])


@pytest.mark.parametrize("scheme", ["HTTP", "HTTPS"])
def test_vllm_may_serve_https(chart: Chart, scheme: str) -> None:
    tls = {"tls": {"existingSecret": "front-door"}} if scheme == "HTTPS" else {}
    vllm = pod_of(chart, **tls)["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert vllm[probe]["httpGet"].get("scheme", "HTTP") == scheme
    url = vllm["lifecycle"]["preStop"]["exec"]["command"][3]
    assert url == f"{scheme.lower()}://localhost:8000/metrics"
    assert ("--ssl-certfile" in vllm["args"]) == (scheme == "HTTPS")
    mounted = [mount["mountPath"] for mount in vllm["volumeMounts"]]
    assert ("/run/secrets/vllm-tls" in mounted) == (scheme == "HTTPS")
