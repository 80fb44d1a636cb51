"""`make bench-peers`: measure our engine, LMCache's, vLLM's own tiers where they run on a CPU, and
the machine's limits, in turn.

The same code (`peer_child.py`) drives all through their public calls, in separate processes and
environments, with default settings, except that ours waits for a slow tier instead of declining it;
ours checks every digest. A store is timed until the tier has the whole prompt. Every byte that
comes back is compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.bench.peer_child import Shape
from tests.bench.peer_places import LMCACHE_PYTHON, PLACES
from tests.bench.peer_reading import HEADINGS, Row, Run, at_place
from tests.bench.peer_rows import PARTS, lmcache_version, not_measured
from tests.bench.report import Section
from tests.bench.vllm_engines import PYTHON as VLLM_PYTHON
from tests.releases import NEWEST_VLLM

ROWS = (*PLACES, *PARTS)
ROUNDS = 5
FULL_MIB = 512
BYTES_A_TOKEN = Shape(1).num_bytes
QUIET_CORES = 0.2


class PeerMissingError(Exception):
    """LMCache or vLLM has not been installed."""


def measure(
    run: Run,
    directory: Path,
    parts: Sequence[str] = (),
    mib: int = FULL_MIB,
    rounds: int = ROUNDS,
) -> tuple[Section, str]:
    """Measure everything.

    Args:
        run: Shows the name of a part while it runs.
        directory: For disks and logs.
        parts: Of `ROWS`; none: all.
        mib: Of a prompt.
        rounds: How many count.

    Returns:
        The table, and remarks: conditions, and what does not run here.

    Raises:
        PeerMissingError: LMCache or vLLM is not installed.
    """
    for python in (LMCACHE_PYTHON, VLLM_PYTHON):
        if not python.exists():
            raise PeerMissingError(f"there is no {python}: run 'make bench-peers'")
    rows: list[Row] = []
    for name in parts or ROWS:
        if name in PLACES:
            rows += at_place(name, run, directory, mib * 2**20 // BYTES_A_TOKEN, rounds)
        else:
            rows += PARTS[name](run, directory, rounds)
    title = f"In turn with LMCache {lmcache_version()} and vLLM {NEWEST_VLLM}: {mib} MiB"
    return Section(title, HEADINGS, [row.cells() for row in rows]), _remark(rows, rounds, directory)


def _remark(rows: Sequence[Row], rounds: int, directory: Path) -> str:
    least, most = (each(row.cores for row in rows) for each in (min, max))
    noise = f" Above {QUIET_CORES} the machine is not quiet." if most > QUIET_CORES else ""
    return (
        f"Medians of {rounds} rounds, in turn; every byte compared. A ratio above 1 says that ours"
        " is faster. Default settings, so ours checks every digest, except that it waits for a slow"
        f" tier instead of declining it. Other processes used {least:.1f} to {most:.1f} of"
        f" {os.cpu_count()} cores.{noise} {not_measured(directory)}"
    )
