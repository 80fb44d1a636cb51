"""A sidecar starts with the variables that a pod is given, and the connector finds it where its
argument says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import jsonpatch
import pytest
from lmcache_core.integrations.vllm.options import read_options
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.injection.sidecar import transfer_config
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures.pods import container, pod
from tests.fixtures.service_process import running_service


@pytest.fixture
def injected() -> dict[str, Any]:
    """The sidecar's container of a small pod."""
    options = injection_options(
        WebhookSettings(
            sidecar_image="s:1", payload_image="p:1", sidecar_options={"log_format": "json"}
        )
    )
    document = pod(
        container(args=["m"]),
        annotations={"lmcache.io/arena-gb": "0.0625", "lmcache.io/disk-gb": "0.1"},
    )
    outcome = review_pod(options, document, "team-a")
    assert outcome.verdict == "injected", outcome.reason
    sidecar: dict[str, Any] = jsonpatch.apply_patch(document, outcome.operations)["spec"][
        "initContainers"
    ][-1]
    return sidecar


def environment_of(sidecar: dict[str, Any], root: Path) -> dict[str, str]:
    """As a kubelet fills it in, with volumes below `root` and free ports."""
    fields = {
        "POD_NAME": "model-0",
        "POD_NAMESPACE": "team-a",
        "POD_UID": "u",
        "POD_IP": "127.0.0.1",
    }
    environ = {
        one["name"]: re.sub(
            r"\$\((\w+)\)",
            lambda match: fields[match[1]],
            one.get("value", fields.get(one["name"], "n")),
        )
        for one in sidecar["env"]
    }
    for mount in sidecar["volumeMounts"]:
        place = root / mount["name"].removeprefix("lmcache-")
        place.mkdir()
        for name, value in environ.items():
            if (
                name.endswith("_PATH")
                and value.startswith(mount["mountPath"])
                and str(root) not in value
            ):
                environ[name] = f"{place}{value.removeprefix(mount['mountPath'])}"
    return environ | {name: "0" for name in environ if name.endswith("_PORT")}


def test_the_sidecar_starts(injected: dict[str, Any], tmp_path: Path) -> None:
    environ = environment_of(injected, tmp_path)
    with running_service("lmcache_sidecar", tmp_path, environ) as service:
        probe = injected["startupProbe"]["httpGet"]
        assert (
            httpx.get(
                f"http://127.0.0.1:{service.ports['health_port']}{probe['path']}", trust_env=False
            ).status_code
            == 200
        )
        status = httpx.get(f"{service.url}/v1/status", trust_env=False).json()
        assert status["instance"] == "team-a.model-0"
        assert status["distributed_url"] == f"lm://127.0.0.1:{service.ports['lm_port']}"
        assert Path(environ["LMCACHE_SIDECAR_SOCKET_PATH"]).is_socket()


def test_the_connector_takes_its_options() -> None:
    config = transfer_config()
    options = read_options(config["kv_connector_extra_config"], "cuda")
    assert options.engine.sidecar_socket == "/run/lmcache/socket/sidecar.sock"
