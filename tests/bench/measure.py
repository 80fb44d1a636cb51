"""Timing: rounds in turn, medians, and what else the machine does meanwhile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROUNDS = 7
GB = 1e9
PROC_STAT = Path("/proc/stat")
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)
"""User, nice, system, interrupts, soft interrupts, stolen by the host; neither idle nor waiting for
a device.
"""
LOAD_S = 2.0

Seconds = tuple[float, ...]
"""Of each round."""
Run = Callable[[str, Callable[[], Any]], Any]
"""Shows the name of a part of the bench, does its work and returns what it returns."""


@dataclass(frozen=True)
class Figure:
    """What was moved, how fast, and a reference: what the machine does with plain calls. Ours may
    be faster, with more threads.

    Attributes:
        num_bytes: Moved in a round.
        limit: The reference that this one is compared with; None for a reference itself.
        limit_seconds: Of the reference's work, done in turn with each round, so that noise hits
            both alike. Empty if `limit` says it all.
    """

    name: str
    num_bytes: int
    seconds: Seconds
    limit: Figure | None = None
    limit_seconds: Seconds = ()

    @property
    def rate(self) -> float:
        """Median, GB/s (10^9 bytes)."""
        return self.num_bytes / statistics.median(self.seconds) / GB

    @property
    def share(self) -> float | None:
        """Rate as a share of the reference's: the median over rounds in turn, or the ratio of the
        medians.
        """
        if self.limit_seconds:
            return median_ratio(self.limit_seconds, self.seconds)
        return None if self.limit is None else self.rate / self.limit.rate


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two times of the same round."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def in_turn(
    *works: Callable[[int], object],
    prepare: Callable[[int], object] | None = None,
    rounds: int = ROUNDS,
) -> list[Seconds]:
    """Return the seconds of every round of each work. All take their turn in each round; the first
    round does not count.

    Args:
        works: Called with the number of the round.
        prepare: Called before each round, not measured.
    """
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 1):
        if prepare is not None:
            prepare(turn)
        for work, of_work in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work(turn)
            of_work.append(time.perf_counter() - began)
    return [tuple(of_work[1:]) for of_work in seconds]


def timed(
    work: Callable[[int], object],
    prepare: Callable[[int], object] | None = None,
    rounds: int = ROUNDS,
) -> Seconds:
    """Return the seconds of every round of one work; see `in_turn`."""
    return in_turn(work, prepare=prepare, rounds=rounds)[0]


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile."""
    return statistics.quantiles(seconds, n=100)[percent - 1]


def median_ms(seconds: Sequence[float]) -> str:
    """Return the median for a table of milliseconds."""
    return f"{statistics.median(seconds) * 1e3:.2f}"


def busy_seconds() -> float:
    """Return the processor time that all cores together have been busy."""
    fields = PROC_STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:]
    ticks = sum(int(fields[column]) for column in BUSY_COLUMNS)
    return ticks / os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far, all threads, to the tick of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def other_load() -> float:
    """Return how many cores were busy for a moment while this process waited."""
    busy_s = busy_seconds()
    time.sleep(LOAD_S)
    return (busy_seconds() - busy_s) / LOAD_S


class OtherLoad:
    """Measure, within a block, how busy processes keep the machine that are neither this one nor
    its children.

    Attributes:
        cores: Mean number of cores; set at the end.
    """

    cores: float

    def __enter__(self) -> Self:
        self._others_s, self._began = self._others_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        others_s = self._others_seconds() - self._others_s
        self.cores = max(0.0, others_s / (time.perf_counter() - self._began))

    @property
    def remark(self) -> str:
        """A sentence below a table."""
        return (
            f"While this was measured, other processes kept {self.cores:.2f} of {os.cpu_count()}"
            " cores busy."
        )

    @staticmethod
    def _others_seconds() -> float:
        children = [
            int(pid)
            for path in Path("/proc/self/task").glob("*/children")
            for pid in path.read_text(encoding="utf-8").split()
        ]
        own_s = time.process_time() + sum(map(processor_seconds, children))
        return busy_seconds() - own_s
