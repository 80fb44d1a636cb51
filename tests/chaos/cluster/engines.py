"""The engine processes, as the run sees them."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_demo.processes import DemoError, Process

from tests.chaos.cluster.worker import BOUND_S, REPORT_S
from tests.fixtures.processes import Processes

SILENCE_S = 3 * BOUND_S + REPORT_S + 3.0
"""Three calls that each end just in time, and a report: one that is silent for longer hangs."""
START_TIMEOUT_S = 60.0


@dataclass
class Window:
    """What one worker reported at once.

    Attributes:
        at_s: `time.monotonic()`.
        wanted: Tokens of prompts that others share.
        hit: Those that were found.
    """

    at_s: float
    wanted: int
    hit: int


@dataclass
class EngineProcess:
    """One worker process.

    Attributes:
        windows: In order of time.
        faults: What must not happen, as it reported it.
        totals: Of its counts.
        misses: Missed chunks by reason.
        longest_s: Its longest call.
    """

    name: str
    process: Process
    windows: list[Window] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    misses: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0
    heard_s: float = field(default_factory=time.monotonic)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> None:
        """Take its reports until it ends."""
        assert self.process.process.stdout is not None
        for text in self.process.process.stdout:
            line = json.loads(text)
            self.heard_s = time.monotonic()
            self.windows.append(Window(line["at_s"], line.get("wanted", 0), line.get("hit", 0)))
            self.faults += [f"{line['at_s']:.2f} {self.name} {fault}" for fault in line["faults"]]
            self.totals.update(
                {name: line.get(name, 0) for name in ("requests", "calls", "wanted", "hit")}
            )
            self.misses, self.longest_s = line["misses"], max(self.longest_s, line["longest_s"])
            if "done" in line:
                self.answers.append(line)

    def tell(self, do: str, timeout_s: float = START_TIMEOUT_S, **more: object) -> dict[str, Any]:
        """Send it a command, and wait for its answer.

        Raises:
            DemoError: No answer within `timeout_s`.
        """
        num_before = len(self.answers)
        stdin = self.process.process.stdin
        assert stdin is not None
        stdin.write((json.dumps({"do": do, **more}) + "\n").encode())
        stdin.flush()
        deadline = time.monotonic() + timeout_s
        while len(self.answers) == num_before:
            if time.monotonic() > deadline or not self.process.is_alive:
                raise DemoError(
                    f"{self.name} did not answer {do!r} within {timeout_s:.0f}"
                    f" s:\n{self.process.tail()}"
                )
            time.sleep(0.02)
        return self.answers[-1]

    def check(self) -> None:
        """Note whether it is silent, or has ended."""
        if not self.process.is_alive:
            self.faults.append(
                f"{self.name} has ended with code {self.process.process.returncode}:"
                f" {self.process.tail()}"
            )
        elif time.monotonic() > self.heard_s + SILENCE_S:
            self.faults.append(f"{self.name} has been silent for more than {SILENCE_S} s: it hangs")


class Engines:
    """One at each sidecar.

    Args:
        processes: Owns them.
        sockets: Of the sidecars.
        seed: Of the workload.
    """

    def __init__(self, processes: Processes, sockets: Sequence[Path], seed: int) -> None:
        self.all: list[EngineProcess] = []
        self._threads: list[threading.Thread] = []
        for i, socket in enumerate(sockets):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = processes.start(
                f"engine-{i}",
                "tests.chaos.cluster.worker",
                [str(socket), str(seed * len(sockets) + i)],
                **pipes,
            )
            self.all.append(EngineProcess(f"engine-{i}", process))
        for engine in self.all:
            self._threads.append(threading.Thread(target=engine.listen, name=engine.name))
            self._threads[-1].start()

    def tell_all(self, do: str) -> None:
        """Tell each the same, one after the other."""
        for engine in self.all:
            engine.tell(do)

    def check(self) -> None:
        """See `EngineProcess.check`."""
        for engine in self.all:
            engine.check()

    @property
    def faults(self) -> list[str]:
        """Of all."""
        return [fault for engine in self.all for fault in engine.faults]

    def hit_ratio(self, begin_s: float, end_s: float) -> float | None:
        """Share of shared tokens that were found in that time; None where none were wanted."""
        windows = [
            window
            for engine in self.all
            for window in list(engine.windows)
            if begin_s <= window.at_s < end_s
        ]
        wanted = sum(window.wanted for window in windows)
        return sum(window.hit for window in windows) / wanted if wanted else None

    def close(self) -> None:
        """End them, and read their last reports."""
        for engine in self.all:
            stdin = engine.process.process.stdin
            assert stdin is not None
            stdin.close()
        for engine, thread in zip(self.all, self._threads, strict=True):
            try:
                engine.process.process.wait(SILENCE_S)
            except subprocess.TimeoutExpired:
                engine.faults.append(f"{engine.name} did not end within {SILENCE_S} s")
                engine.process.kill()
            thread.join()
            stdout = engine.process.process.stdout
            assert stdout is not None
            stdout.close()
