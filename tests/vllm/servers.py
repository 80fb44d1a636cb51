"""vLLM's own HTTP server, as people run it."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fixtures.ports import free_port
from tests.vllm.engines import Ask
from tests.vllm.models import LLAMA
from tests.vllm.processes import Owner

START_TIMEOUT_S = 150.0
ANSWER_S = 120.0


class Server:
    """An OpenAI-compatible server.

    Args:
        port: Its port.
        log: Its log; of another program with such an interface, too.
    """

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60.0) as response:
            text = response.read()
        return dict(json.loads(text)) if text.strip().startswith(b"{") else {}

    def complete(self, ask: Ask) -> dict[str, Any]:
        return self.post("/v1/completions", body_of(ask))

    def first_token_s(self, ask: Ask) -> float:
        """Seconds until the first token of a streamed answer, of which the rest is read, too."""
        began, first = time.monotonic(), 0.0
        with self.streamed(ask) as lines:
            for line in lines:
                if not first and line.startswith(b"data:"):
                    first = time.monotonic() - began
        return first

    @contextmanager
    def streamed(
        self, ask: Ask, timeout_s: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The lines of a streamed answer; leaving early closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s or 120.0)
        try:
            body = json.dumps(body_of(ask) | {"stream": True})
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10.0) as response:
            return str(response.read().decode())


def body_of(ask: Ask) -> dict[str, Any]:
    """The body of a request for a completion."""
    body: dict[str, Any] = {
        "model": LLAMA,
        "prompt": list(ask.tokens),
        "max_tokens": ask.num_new,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
    }
    if ask.transfer is not None:
        body["kv_transfer_params"] = ask.transfer
    return body


def start(owner: Owner, options: dict[str, Any], name: str = "server") -> Server:
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
    return Server(port, owner.command(arguments, name, environ))
