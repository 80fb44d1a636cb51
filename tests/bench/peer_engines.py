"""Engines of `peers` in processes and environments of their own: ours, LMCache's, vLLM's tiers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.bench.peer_child import Shape
from tests.bench.peer_places import LMCACHE_PYTHON, ROOT, START_TIMEOUT_S, peer_environment
from tests.bench.vllm_engines import PYTHON as VLLM_PYTHON
from tests.bench.vllm_engines import vllm_environment

CHILD = "tests.bench.peer_child"
ANSWER_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0


class Child:
    """One engine in its own process.

    Args:
        kind: As `peer_child` knows it.
        tier: The tier at which a store ends, by its name in `lookup`.
        options: Options of its configuration.
        shape: Of prompts.
        log: File for its output.
    """

    def __init__(
        self, kind: str, tier: str, options: dict[str, Any], shape: Shape, log: Path
    ) -> None:
        environment, python = peer_environment(), sys.executable
        if kind.startswith("ours"):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        elif kind.startswith("vllm"):
            environment |= vllm_environment()
            python = str(VLLM_PYTHON)
        else:
            environment["PYTHONPATH"] = str(ROOT)
            python = str(LMCACHE_PYTHON)
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, "-m", CHILD, kind, tier, json.dumps(options), json.dumps(shape.as_json())],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def wait_ready(self) -> None:
        """Wait until it has started."""
        self._read(START_TIMEOUT_S)

    def ask(self, what: str, turn: int) -> float:
        """Return the seconds that a call took."""
        return float(self.answer(what, turn)["seconds"])

    def answer(self, what: str, turn: int) -> dict[str, Any]:
        """Return all that it says about a call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "turn": turn}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(ANSWER_TIMEOUT_S)

    def end(self) -> None:
        """Let it end by itself, or end it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if readable else b""
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:]
            what = "has ended" if readable else "gives no answer in time"
            raise RuntimeError(f"{self._log.stem} {what}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def children(of: Mapping[str, tuple[Any, ...]], directory: Path) -> Iterator[dict[str, Child]]:
    """Engines that have started, by the name given to each with the arguments of its `Child`."""
    with ExitStack() as stack:
        started = {}
        for name, arguments in of.items():
            started[name] = Child(*arguments, directory / f"{name}.log")
            stack.callback(started[name].end)
        for child in started.values():
            child.wait_ready()
        yield started
