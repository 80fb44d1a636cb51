"""Command lines of containers: which start vLLM's server, and where the argument goes."""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_webhook.injection.command_line import dotted, plan_arguments, runs_vllm
from lmcache_webhook.injection.errors import DeclinedError
from lmcache_webhook.injection.pod import Container
from lmcache_webhook.injection.sidecar import transfer_config

SCRIPT = "vllm serve m"


def container(**members: Any) -> Container:
    return Container.model_validate({"name": "c", "image": "registry/engine:1", **members})


@pytest.mark.parametrize(
    ("members", "field", "index"),
    [
        ({"command": ["vllm", "serve", "m"]}, "args", None),
        ({"command": ["/opt/venv/bin/vllm"], "args": ["serve", "m"]}, "args", None),
        ({"command": ["tini", "--", "vllm", "serve", "m"]}, "args", None),
        ({"command": ["/usr/bin/env", "python3.12", "-u", "-m", "vllm.entrypoints.openai.api_server"]}, "args", None),
        ({"command": ["python", "-m", "vllm.entrypoints.cli.main", "serve", "m"]}, "args", None),
        ({"image": "vllm/vllm-openai:v0.32.0"}, "args", None),
        ({"image": "docker.io/rocm/vllm@sha256:ab", "args": ["--model", "m"]}, "args", None),
        ({"image": "my-vllm"}, "args", None),
        ({"command": ["sh", "-c", SCRIPT]}, "command", 2),
        ({"command": ["/bin/bash", "-c"], "args": [SCRIPT]}, "args", 0),
        ({"command": ["/bin/bash"], "args": ["-lc", SCRIPT]}, "args", 1),
        ({"command": ["bash", "-euo", "pipefail", "-c", SCRIPT]}, "command", 4),
        ({"command": ["bash", "-o", "pipefail", "-e", "-c", SCRIPT, "name"]}, "command", 5),
        ({"command": ["tini", "--", "bash", "--login", "-c", SCRIPT]}, "command", 5),
        ({"args": ["sh", "-c", SCRIPT]}, "args", 2),
    ],
)
def test_who_runs_vllm_and_where_the_argument_goes(members: dict[str, Any], field: str, index: int | None) -> None:
    one = container(**members)
    assert runs_vllm(one)
    [edit] = plan_arguments(one, transfer_config())
    assert (edit.field, edit.index) == (field, index)
    if index is not None:
        assert edit.items == (" ".join([SCRIPT, *dotted(transfer_config())]),)


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
        {"command": ["sh", "/start.sh", "-c", SCRIPT]},
        {"command": ["bash", "-c", "sleep 1", SCRIPT]},
        {"image": "vllm/vllm-openai", "command": ["sleep", "inf"]},
    ],
)
def test_who_does_not(members: dict[str, Any]) -> None:
    assert not runs_vllm(container(**members))


def test_what_is_named_and_is_not_the_server_keeps_its_command_line() -> None:
    assert plan_arguments(container(command=["ray", "start", "--block"]), transfer_config()) == []
    assert plan_arguments(container(command=["sh", "-c", "ray start"]), transfer_config()) == []
    assert plan_arguments(container(), transfer_config()) != [], "the image's own entry point, which was named, is taken for it"


def test_members_of_the_option_need_no_quotes() -> None:
    words = dotted(transfer_config())
    assert "--kv-transfer-config.kv_connector=LMCacheConnector" in words
    assert "--kv-transfer-config.kv_connector_extra_config.sidecar_socket=/run/lmcache/socket/sidecar.sock" in words
    assert all(word.isascii() and not set(word) & set(" '\"$\\`{}[]*?;&|()<>#~!") for word in words)


@pytest.mark.parametrize("word", ["--kv-transfer-config", "--kv-transfer-config.kv_role=kv_both", "--kv_offloading_backend"])
def test_another_connector_is_left_alone(word: str) -> None:
    for members in ({"command": ["vllm", "serve", "m", word]}, {"args": [word]}, {"env": [{"name": "ARGS", "value": f"-x {word}"}]}):
        with pytest.raises(DeclinedError, match="one vLLM has one connector"):
            plan_arguments(container(**members), transfer_config())
