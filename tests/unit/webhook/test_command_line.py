"""Command lines of containers: which start vLLM's server, and where the argument goes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lmcache_webhook.injection.command_line import plan_arguments, runs_vllm
from lmcache_webhook.injection.pod import Container, DeclinedError
from lmcache_webhook.injection.sidecar import transfer_config

from tests.fixtures.pods import SCRIPT_OF_A_RAY_LEADER, SCRIPT_OF_KSERVE
from tests.releases import NEWEST_VLLM

SCRIPT = "vllm serve m"
SERVER = "vllm.entrypoints.openai.api_server"


def container(**members: Any) -> Container:
    return Container.model_validate({"name": "c", "image": "registry/engine:1", **members})


@pytest.mark.parametrize(
    "members",
    [
        {"command": ["vllm", "serve", "m"]},
        {"command": ["/opt/venv/bin/vllm"], "args": ["serve", "m"]},
        {"command": ["tini", "--", "vllm", "serve", "m"]},
        {"command": ["sh", "-c", 'ulimit -l unlimited; exec "$@"', "--", "vllm", "serve", "m"]},
        {"command": f"/usr/bin/env python3.12 -u -m {SERVER}".split()},
        {"command": ["python", "-m", "vllm.entrypoints.cli.main", "serve", "m"]},
        {"image": f"vllm/vllm-openai:v{NEWEST_VLLM}"},
        {"image": "docker.io/rocm/vllm@sha256:ab", "args": ["--model", "m"]},
        {"image": "localhost:5000/my-vllm:3@sha256:ab"},
        {"image": "my-vllm"},
    ],
)
def test_who_runs_vllm_gets_the_argument(members: dict[str, Any]) -> None:
    one = container(**members)
    assert runs_vllm(one)
    option, value = plan_arguments(one, transfer_config())
    assert option == "--kv-transfer-config"
    assert json.loads(value) == transfer_config()


@pytest.mark.parametrize(
    "members",
    [
        {"command": ["sh", "-c", SCRIPT]},
        {"command": ["/bin/bash", "-c"], "args": [SCRIPT]},
        {"command": ["/bin/bash"], "args": ["-lc", f"cd /tmp && exec {SCRIPT} --port 8000"]},
        {"command": ["bash", "-o", "pipefail", "-e", "-c", "vllm \\\n  serve m", "name"]},
        {"command": ["tini", "--", "entrypoint.sh", f"ray start; python3 -m {SERVER}"]},
        {"image": "vllm/vllm-openai", "args": ["sh", "-c", SCRIPT]},
        {"command": ["bash", "-c", SCRIPT_OF_KSERVE]},
        {"command": ["bash", "-c", SCRIPT_OF_A_RAY_LEADER]},
    ],
)
def test_a_shell_script_is_never_edited(members: dict[str, Any]) -> None:
    one = container(**members)
    assert runs_vllm(one)
    with pytest.raises(DeclinedError, match=r"in a shell script, which is never edited: write `co"):
        plan_arguments(one, transfer_config())


def test_who_names_our_connector_keeps_its_command_line() -> None:
    """In a script, or in a variable that a script reads."""
    option = "--kv-transfer-config.kv_connector_module_path=lmcache_core.integrations.vllm"
    for members in (
        {"command": ["sh", "-c", f"{SCRIPT} {option}"]},
        {"command": ["start.sh"], "env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": option}]},
    ):
        one = container(**members)
        assert runs_vllm(one)
        assert plan_arguments(one, transfer_config()) == ()


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"image": "nginx:vllm"},
        {"image": "registry/vllm/router:1"},
        {"command": ["vllm", "bench", "serve"]},
        {"command": ["vllm"]},
        {"command": ["python", "-m", "vllm.entrypoints.grpc_server"]},
        {"command": ["sh", "-c"]},
        {"command": ["bash", "-c", "sleep 1"]},
        {"command": ["bash", "-c", "pip install vllm; my-vllm --serve m"]},
        {"image": "vllm/vllm-openai", "command": ["sleep", "inf"]},
    ],
)
def test_who_does_not(members: dict[str, Any]) -> None:
    assert not runs_vllm(container(**members))


def test_what_is_named_and_is_not_the_server_keeps_its_command_line() -> None:
    assert plan_arguments(container(command=["ray", "start", "--block"]), transfer_config()) == ()
    assert plan_arguments(container(command=["sh", "-c", "ray start"]), transfer_config()) == ()
    assert plan_arguments(container(), transfer_config()) != (), (
        "the image's own entry point, which was named, is taken for it"
    )


@pytest.mark.parametrize(
    "word",
    ["--kv-transfer-config", "--kv-transfer-config.kv_role=kv_both", "--kv_offloading_backend"],
)
def test_another_connector_is_left_alone(word: str) -> None:
    for members in (
        {"command": ["vllm", "serve", "m", word]},
        {"args": [word]},
        {"env": [{"name": "ARGS", "value": f"-x {word}"}]},
    ):
        with pytest.raises(DeclinedError, match="one vLLM has one connector"):
            plan_arguments(container(**members), transfer_config())
