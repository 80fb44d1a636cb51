"""Dynamo's simulated engines, which publish vLLM's KV events while requests keep them busy: load
for an indexer. To install them: `pip install --no-deps ai-dynamo==1.6.1`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

NAME = "mocked"
HTTP_PORT, FIRST_EVENTS_PORT = 18_940, 18_950
"""They listen on every interface, so run this in a network namespace."""
SPEEDUP = 20
"""Times as fast as an engine."""
NUM_CLIENTS, PAUSE_S = 8, 0.2
"""Without pauses they take every processor, and a judge that lags says nothing."""
START_S = 120.0
NUM_PROMPTS, PROMPT_TOKENS = 2_000, (256, 2_048)
WORDS = range(20, 4_000)


class Mockers:
    """Some engines behind Dynamo's frontend, and clients that ask them.

    Args:
        model: Directory of a model; its tokenizer is read.
    """

    def __init__(self, num_engines: int, model: str) -> None:
        self.endpoints = [
            f"tcp://127.0.0.1:{FIRST_EVENTS_PORT + number}" for number in range(num_engines)
        ]
        self._directory = tempfile.TemporaryDirectory()
        engines = {
            "model-path": model,
            "model-name": NAME,
            "num-workers": num_engines,
            "block-size": 16,
            "speedup-ratio": SPEEDUP,
            "zmq-kv-events-ports": ",".join(one.rpartition(":")[2] for one in self.endpoints),
        }
        self._processes = [
            self._start("mocker", engines),
            self._start("frontend", {"http-port": HTTP_PORT, "router-mode": "kv"}),
        ]
        self._answered = itertools.count()
        self._ends = False
        deadline = time.monotonic() + START_S
        while not self._ask([WORDS[0]] * 32):
            assert time.monotonic() < deadline, "Dynamo's frontend does not answer"
            time.sleep(0.5)
        self._clients = [
            threading.Thread(target=self._run, args=(seed,)) for seed in range(NUM_CLIENTS)
        ]
        for client in self._clients:
            client.start()

    def close(self) -> int:
        """End everything; return how many requests were answered."""
        self._ends = True
        for client in self._clients:
            client.join()
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()
        return next(self._answered)

    def _start(self, module: str, options: dict[str, Any]) -> subprocess.Popen[bytes]:
        arguments = [f"--{name}={value}" for name, value in options.items()]
        environ = {
            "DYN_FILE_KV": str(Path(self._directory.name) / "kv"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
        }
        command = [sys.executable, "-m", f"dynamo.{module}", "--discovery-backend=file"]
        return subprocess.Popen([*command, *arguments], env=os.environ | environ)

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._ends:
            # One of so many prompts, some of which are others' beginnings.
            tokens = random.Random(rng.randrange(NUM_PROMPTS) // 4)
            prompt = [tokens.choice(WORDS) for _ in range(rng.randint(*PROMPT_TOKENS))]
            if self._ask(prompt):
                next(self._answered)
            time.sleep(PAUSE_S)

    def _ask(self, prompt: list[int]) -> bool:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 8}
        request = urllib.request.Request(
            f"http://127.0.0.1:{HTTP_PORT}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30.0) as answer:
            return answer.status == 200
        return False
