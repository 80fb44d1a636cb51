"""How much of the machine others use while something is timed: with two cores, a second thread
is only worth what they leave.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

PROC_STAT = Path("/proc/stat")
LOAD_SECONDS = 2.0
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)
"""User, nice, system, interrupts, soft interrupts, stolen by the host; not idle, not waiting for
a device.
"""


def busy_ticks(stat: str) -> int:
    """Clock ticks that all cores were busy for since the start, from the text of `/proc/stat`."""
    fields = stat.splitlines()[0].split()[1:]
    return sum(int(fields[column]) for column in BUSY_COLUMNS)


def other_load() -> float:
    """Return how many cores were busy for a moment while this process waited."""
    busy = busy_ticks(PROC_STAT.read_text())
    time.sleep(LOAD_SECONDS)
    return (busy_ticks(PROC_STAT.read_text()) - busy) / os.sysconf("SC_CLK_TCK") / LOAD_SECONDS


class Neighbours:
    """Counts while it is entered.

    Attributes:
        cores: How many cores other processes kept busy, mean; set at the end.
    """

    cores: float

    def __enter__(self) -> Neighbours:
        self._busy, self._own, self._begin = (
            busy_ticks(PROC_STAT.read_text()),
            time.process_time(),
            time.perf_counter(),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        busy = (busy_ticks(PROC_STAT.read_text()) - self._busy) / os.sysconf("SC_CLK_TCK")
        own = time.process_time() - self._own
        self.cores = max(0.0, (busy - own) / (time.perf_counter() - self._begin))
