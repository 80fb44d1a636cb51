"""vLLM's own HTTP server, as people run it: three processes, and hits visible in the answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.ports import free_port
from tests.vllm.engines import CHUNK_SIZE, Ask
from tests.vllm.models import LLAMA
from tests.vllm.references import TOLERANCES, prompt
from tests.vllm.sidecars import Growth, eventually
from tests.vllm.worlds import World, with_example_connector

START_TIMEOUT_S = 150.0


class Server:
    """An OpenAI-compatible server.

    Args:
        port: Its port.
        log: Its log.
    """

    def __init__(self, port: int, log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.log = log

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._url + "/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self._url + path, data, {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60.0) as response:
            text = response.read()
        return dict(json.loads(text)) if text.strip().startswith(b"{") else {}

    def complete(self, ask: Ask) -> dict[str, Any]:
        body = {
            "model": LLAMA,
            "prompt": list(ask.tokens),
            "max_tokens": ask.num_new,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
        }
        return self.post("/v1/completions", body)

    def metrics(self) -> str:
        with urllib.request.urlopen(self._url + "/metrics", timeout=10.0) as response:
            return str(response.read().decode())


def start(world: World, options: dict[str, Any]) -> Server:
    """A server whose log is as people have it: what it logs every ten seconds is made of the
    connector's figures, too.
    """
    port = free_port()
    arguments = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        LLAMA,
    ]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        match value:
            case True:
                arguments.append(flag)
            case False:
                pass
            case dict():
                arguments += [flag, json.dumps(value)]
            case _:
                arguments += [flag, str(value)]
    arguments += ["--enable-prompt-tokens-details"]
    environ = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    return Server(port, world.owner.command(arguments, "server", environ))


@pytest.mark.parametrize("is_child", [False, True])
def test_hits_are_visible_in_the_answers(world: World, is_child: bool) -> None:
    """By itself, and as a child of `MultiConnector`, of which the server reads figures in
    another way.
    """
    sidecar = world.sidecar()
    ask = Ask(prompt(280, 1000))
    options = world.options()
    server = start(
        world, with_example_connector(options, world.owner.directory) if is_child else options
    )
    eventually(server.is_healthy, "the server does not become healthy", START_TIMEOUT_S)
    # Its scheduler, and its worker's stores and loads: or the first request of a new pod would
    # miss.
    assert len(sidecar.get("/v1/clients")["clients"]) == 3
    stored = Growth(sidecar)
    cold = server.complete(ask)
    stored.reaches(3)
    server.post("/reset_prefix_cache")
    hit = server.complete(ask)
    assert (cold["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) == 0
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * CHUNK_SIZE
    (expected,) = world.references.answers([ask], LLAMA)
    for answer in (cold, hit):
        said = answer["choices"][0]["logprobs"]
        assert said["tokens"] == [f"w{token}" for token in expected.tokens]
        wanted = [
            of_token[token]
            for of_token, token in zip(expected.logprobs, expected.tokens, strict=True)
        ]
        assert (
            max(
                abs(ours - theirs)
                for ours, theirs in zip(said["token_logprobs"], wanted, strict=True)
            )
            <= TOLERANCES["float32"]
        )
    lines = server.metrics().splitlines()
    assert any(
        line.startswith("vllm:lmcache_stored_chunks_total{") and float(line.split()[-1]) >= 3
        for line in lines
    )
