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

CLONE_NEWNET, IFF_UP, SIOCSIFFLAGS = 0x40000000, 0x1, 0x8914
START_S = 60.0


class Judge:
    """The indexer and its HTTP interface."""

    def __init__(self) -> None:
        _unshare_network()
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
        self._process.kill()
        self._process.wait()


def _unshare_network() -> None:
    if ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        return  # not allowed here
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


if __name__ == "__main__":
    serve(Judge())  # type: ignore[arg-type]
