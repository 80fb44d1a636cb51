"""Dynamo's indexer of KV events, in a network namespace where that is allowed: it listens on every
interface. It does what lines of JSON on its input say.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from typing import Any

from tests.vllm.engine_child import serve
from tests.vllm.mockers import Mockers

CLONE_NEWNET, IFF_UP, SIOCSIFFLAGS = 0x40000000, 0x1, 0x8914
START_S = 60.0


class Judge:
    """The indexer and its HTTP interface."""

    def __init__(self) -> None:
        _unshare_network()
        self._mockers: Mockers | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        options = ["--port", str(self._port), "--threads", "1", "--block-size", "16"]
        self._process = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", *options])
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.ask("/workers")
                return
            assert time.monotonic() < deadline, "the indexer does not answer"
            time.sleep(0.1)

    def ask(self, path: str, body: Any = None) -> Any:
        """Its answer to a GET, or to a POST of this body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30.0) as response:
            return json.loads(response.read())

    def register(self, endpoint: str, replay: str | None) -> None:
        """Read what an engine publishes, also after it has started again."""
        body = {"instance_id": 1, "endpoint": endpoint, "replay_endpoint": replay, "dp_rank": 0}
        self.ask("/register", body | {"model_name": "model", "block_size": 16})

    def load(self, num_engines: int, model: str) -> None:
        """Read simulated engines as well, kept busy until `loaded`."""
        self._mockers = Mockers(num_engines, model)
        for number, endpoint in enumerate(self._mockers.endpoints, 2):
            body = {"instance_id": number, "endpoint": endpoint, "dp_rank": 0}
            self.ask("/register", body | {"model_name": "model", "block_size": 16})

    def loaded(self) -> dict[str, int]:
        """End the load; return what it was."""
        assert self._mockers is not None
        num_known = len(self.ask("/dump")["model:default"]["events"])
        num_requests, self._mockers = self._mockers.close(), None
        return {"requests": num_requests, "known": num_known}

    def match(self, prompts: list[list[int]]) -> list[dict[str, int]]:
        """How many tokens of each prompt engine 1 has, by medium; each medium includes the faster
        ones.
        """
        found = []
        for prompt in prompts:
            answer = self.ask("/query", {"token_ids": prompt, "model_name": "model"})
            found.append(answer["instances"].get("1", {"gpu": 0, "cpu": 0, "disk": 0}))
        return found

    def close(self) -> None:
        """End it."""
        if self._mockers is not None:
            self._mockers.close()
        self._process.kill()
        self._process.wait()


def _unshare_network() -> None:
    if ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        return  # not allowed here
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


if __name__ == "__main__":
    serve(Judge())  # type: ignore[arg-type]
