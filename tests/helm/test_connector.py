"""vLLM uses the cache: what is copied into its pod, what it is told, and that the connector
understands it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml
from lmcache_core.integrations.vllm.options import read_options

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

MODEL: Manifest = {"name": "tiny", "model": "example/tiny-llama"}


def pod_of(rendering: Rendering) -> Manifest:
    return dict(rendering.pods())["cache-lmcache-vllm-tiny"]


def transfer_config(rendering: Rendering) -> Manifest:
    arguments = pod_of(rendering)["containers"][0]["args"]
    config: Manifest = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return config


def test_vllm_finds_its_sidecar(chart: Chart) -> None:
    rendering = chart.render({"models": [MODEL]})
    config = transfer_config(rendering)
    assert config["kv_load_failure_policy"] == "recompute", "vLLM's own default ends the request"
    sidecar = yaml.safe_load(rendering.get("ConfigMap", "vllm-tiny")["data"]["config.yaml"])
    assert config["kv_connector_extra_config"] == {"lmcache.sidecar_socket": sidecar["socket_path"]}


def test_options_reach_the_connector(chart: Chart) -> None:
    options = {"lmcache.load": "sync", "lmcache.chunk_size": 512, "lmcache.save_decode_cache": True}
    config = transfer_config(
        chart.render({"models": [MODEL | {"connector": {"options": options}}]})
    )
    assert (
        config["kv_connector_extra_config"]
        == {"lmcache.sidecar_socket": "/run/lmcache/socket/sidecar.sock"} | options
    )
    read = read_options(config["kv_connector_extra_config"], "cuda")
    assert (read.load, read.engine.chunk_size, read.engine.save_decode_cache) == ("sync", 512, True)
    assert read.engine.sidecar_socket == "/run/lmcache/socket/sidecar.sock"


def test_the_connector_is_copied_in_and_found(chart: Chart) -> None:
    pod = pod_of(chart.render({"models": [MODEL | {"connector": {"pythonPath": "/extra"}}]}))
    payload, vllm = pod["initContainers"][0], pod["containers"][0]
    assert payload["command"] == ["/payload/install", "/opt/lmcache"]
    assert payload["volumeMounts"] == [{"name": "payload", "mountPath": "/opt/lmcache"}]
    assert {"name": "payload", "mountPath": "/opt/lmcache", "readOnly": True} in vllm[
        "volumeMounts"
    ]
    assert {"name": "PYTHONPATH", "value": "/extra:/opt/lmcache/python"} in vllm["env"]
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "payload")
    assert "sizeLimit" in volume["emptyDir"]


def test_the_connector_can_be_left_out(chart: Chart) -> None:
    pod = pod_of(chart.render({"models": [MODEL | {"connector": {"enabled": False}}]}))
    assert [container["name"] for container in pod["initContainers"]] == ["sidecar"]
    assert "--kv-transfer-config" not in pod["containers"][0]["args"]
    assert "payload" not in json.dumps(pod)
    assert not any(one["name"] == "PYTHONPATH" for one in pod["containers"][0]["env"])


@pytest.mark.parametrize("scheme", ["HTTP", "HTTPS"])
def test_vllm_may_serve_https(chart: Chart, scheme: str) -> None:
    tls = {"tls": {"existingSecret": "front-door"}} if scheme == "HTTPS" else {}
    pod = pod_of(chart.render({"models": [MODEL | tls]}))
    vllm = pod["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert vllm[probe]["httpGet"].get("scheme", "HTTP") == scheme
    assert (
        vllm["lifecycle"]["preStop"]["exec"]["command"][3]
        == f"{scheme.lower()}://localhost:8000/metrics"
    )
    assert ("--ssl-certfile" in vllm["args"]) == (scheme == "HTTPS")
    mounted = [mount["mountPath"] for mount in vllm["volumeMounts"]]
    assert ("/run/secrets/vllm-tls" in mounted) == (scheme == "HTTPS")
