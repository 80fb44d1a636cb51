"""Which command lines start vLLM's server, where the argument goes, and that docs/injection.md has
the same words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.integrations.vllm.releases import too_old
from lmcache_webhook.injection.command_line import OPTION
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.injection.sidecar import transfer_config

from tests.fixtures.pods import CONNECTOR_IN_A_SCRIPT, Pod, container, pod
from tests.fixtures.reviews import declined, injected
from tests.releases import NEWEST_VLLM

SERVER = "vllm.entrypoints.openai.api_server"
SCRIPT = "vllm serve m; true"
OURS = "--kv-transfer-config.kv_connector_module_path=lmcache_core.integrations.vllm"


def of(**members: Any) -> Pod:
    """A pod whose image says nothing of what runs in it."""
    return pod(container(**{"image": "registry/engine:1"} | members))


@pytest.mark.parametrize(
    "members",
    [
        {"command": ["vllm", "serve", "m"]},
        {"command": ["tini", "--", "vllm", "serve", "m"]},
        {"command": ["sh", "-c", 'ulimit -l unlimited; exec "$@"', "--", "vllm", "serve", "m"]},
        {"command": f"/usr/bin/env python3.12 -u -m {SERVER}".split()},
        {"image": f"vllm/vllm-openai:v{NEWEST_VLLM}"},
        {"image": "docker.io/rocm/vllm@sha256:ab", "args": ["--model", "m"]},
        {"image": "my-vllm"},
    ],
)
def test_container_that_runs_vllm_gets_the_argument(
    members: dict[str, Any], options: InjectionOptions
) -> None:
    [engine] = injected(options, of(**members))["spec"]["containers"]
    *before, option, value = engine["args"]
    assert (before, option) == (members.get("args", []), "--kv-transfer-config")
    assert json.loads(value) == transfer_config()


@pytest.mark.parametrize(
    "members",
    [
        {"command": ["/bin/bash", "-c"], "args": [SCRIPT]},
        {"command": ["/bin/bash"], "args": ["-lc", f"cd /tmp && exec {SCRIPT} --port 8000"]},
        {"command": ["bash", "-o", "pipefail", "-e", "-c", "vllm \\\n  serve m | cat", "name"]},
        {"command": ["tini", "--", "entrypoint.sh", f"ray start; python3 -m {SERVER}"]},
    ],
)
def test_a_shell_script_of_more_than_that_is_not_edited(
    members: dict[str, Any], options: InjectionOptions
) -> None:
    text = "in a shell script that is more than this one command: write `co"
    assert text in declined(options, of(**members))


@pytest.mark.parametrize(
    "members",
    [
        {"command": ["sh", "-c", f"{SCRIPT} {OURS}"]},
        {"command": ["start.sh"], "env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": OURS}]},
    ],
    ids=["in a script", "in a variable that a script reads"],
)
def test_command_line_with_our_connector_is_kept(
    members: dict[str, Any], options: InjectionOptions
) -> None:
    [engine] = injected(options, of(**members))["spec"]["containers"]
    assert (engine["command"], "args" in engine) == (members["command"], False)


@pytest.mark.parametrize(
    "members",
    [
        {"image": "nginx:vllm"},
        {"command": ["vllm", "bench", "serve"]},
        {"command": ["python", "-m", "vllm.entrypoints.grpc_server"]},
        {"command": ["bash", "-c", "pip install vllm; my-vllm --serve m"]},
        {"image": "vllm/vllm-openai", "command": ["sleep", "inf"]},
    ],
)
def test_containers_that_do_not_run_vllm(
    members: dict[str, Any], options: InjectionOptions
) -> None:
    assert "looks as if it ran vLLM" in declined(options, of(**members))


@pytest.mark.parametrize(
    ("command", "is_told"), [(None, True), (["ray", "start"], False), (["sh", "-c", "ray"], False)]
)
def test_named_container_runs_the_server_unless_its_command_is_another(
    command: list[str] | None, is_told: bool, options: InjectionOptions
) -> None:
    document = of(**({} if command is None else {"command": command}))
    document["metadata"]["annotations"] = {"lmcache.io/container": "vllm"}
    [engine] = injected(options, document)["spec"]["containers"]
    assert ("args" in engine) == is_told


@pytest.mark.parametrize(
    "word",
    ["--kv-transfer-config", "--kv-transfer-config.kv_role=kv_both", "--kv_offloading_backend"],
)
def test_another_connector_is_left_alone(word: str, options: InjectionOptions) -> None:
    for members in (
        {"command": ["vllm", "serve", "m", word]},
        {"image": "vllm", "args": [word]},
        {"image": "vllm", "env": [{"name": "ARGS", "value": f"-x {word}"}]},
    ):
        assert "one vLLM has one connector" in declined(options, of(**members))


PAGE = Path(__file__).resolve().parents[3] / "docs" / "injection.md"


def leaves(config: Mapping[str, Any], above: str) -> Iterator[str]:
    """vLLM takes `--option.key=value` for a member of a JSON option."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}.{name}")
        else:
            yield f"{above}.{name}={value}"


def test_words_for_scripts_are_the_argument() -> None:
    text = PAGE.read_text()
    words = re.findall(rf"{OPTION}\.\S+=\S+", text)
    assert words == list(leaves(transfer_config(), OPTION)) == CONNECTOR_IN_A_SCRIPT.split()
    assert all(
        word.isascii() and not set(word) & set(" '\"$\\`{}[]*?;&|()<>#~!") for word in words
    ), "plain in any quotes"


def test_page_quotes_the_refusal_of_an_older_vllm() -> None:
    assert f"`{too_old('0.11.0')}`" in PAGE.read_text()
