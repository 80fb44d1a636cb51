"""LMCache engines as processes of their own, in the environment that `make test-lmcache` makes
for them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".lmcache" / "venv" / "bin" / "python"
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
CHUNK_TOKENS = 64


class LMCacheEngine:
    """One engine. Its log goes to a file, for the failure report.

    Args:
        port: Of the listener that is its remote tier.
        log: Where its log goes.
        options: Of its configuration, over those that all have.
    """

    def __init__(self, port: int, log: Path, **options: Any) -> None:
        config = {
            "chunk_size": CHUNK_TOKENS,
            "local_cpu": False,
            "max_local_cpu_size": 0.1,
            "remote_url": f"lm://127.0.0.1:{port}",
            "remote_serde": "naive",
        }
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LMCACHE_", "PYTHONPATH"))
        }
        environ |= {
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    str(PYTHON),
                    str(Path(__file__).with_name("engine_child.py")),
                    json.dumps(config | options),
                ],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def store(self, tokens: list[int]) -> None:
        """Store the KV of these tokens. It is sent in the background."""
        self._ask("store", tokens)

    def lookup(self, tokens: list[int]) -> int:
        """How many of them are found."""
        return int(self._ask("lookup", tokens)["num_tokens"])

    def retrieve(self, tokens: list[int]) -> int:
        """How many of them were loaded; what was loaded is right, and nothing else was touched."""
        answer = self._ask("retrieve", tokens)
        assert answer["is_right"], f"other KV than was stored: {answer}"
        assert answer["rest_untouched"], f"KV beyond what was reported: {answer}"
        return int(answer["num_tokens"])

    def wait_stored(self, tokens: list[int]) -> None:
        """Until what was stored has arrived; it is never acknowledged."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self.lookup(tokens) < len(tokens):
            assert time.monotonic() < deadline, f"not stored in time: {self.log}"
            time.sleep(0.05)

    def wait_ready(self) -> None:
        """Until it has started."""
        assert self._read(START_TIMEOUT_S) == {"ready": True}

    def close(self) -> None:
        """Let it end by itself, and see that it does so well."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(ANSWER_TIMEOUT_S) == 0, self.log

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(ANSWER_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text(errors="replace")[-6000:]

    def _ask(self, what: str, tokens: list[int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "tokens": tokens}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(ANSWER_TIMEOUT_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if readable else b""
        assert line, f"the engine does not answer: {self.log}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def lmcache_engines(
    port: int, directory: Path, *names: str, **options: Any
) -> Iterator[list[LMCacheEngine]]:
    """Engines that have started, side by side; ended by force if the test has not closed them."""
    engines = [LMCacheEngine(port, directory / f"{name}.log", **options) for name in names]
    try:
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.kill()
