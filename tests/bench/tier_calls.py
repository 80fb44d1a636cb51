"""How long `LMCacheTier` keeps the thread of vLLM's scheduler, with a running sidecar."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.engines import running_sidecar
from tests.bench.report import Section
from tests.bench.tier_child import BESIDE, NUM_KEYS
from tests.bench.vllm_engines import PYTHON, vllm_environment

ARENA_GB = 2.5
GOAL_MS = 1.0
TIMEOUT_S = 300.0


def measure(directory: Path) -> Section:
    """Time everything; takes about two minutes.

    Args:
        directory: For the sidecar's socket and log.
    """
    with running_sidecar(directory, ARENA_GB) as socket:
        child = subprocess.run(
            [str(PYTHON), "-m", "tests.bench.tier_child", str(socket)],
            env=os.environ | vllm_environment(),
            stdout=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=True,
        )
    return table(json.loads(child.stdout.splitlines()[-1]))


def table(seconds: Mapping[str, Sequence[tuple[float, float]]]) -> Section:
    """The table of calls.

    Args:
        seconds: Time and processor time of each call, by its name and, after a comma, what went on.
    """
    names = list(dict.fromkeys(name.rsplit(", ", 1)[0] for name in seconds))
    rows = []
    for name in names:
        cells = [name]
        for beside in BESIDE:
            wall, cpu = (
                statistics.quantiles(each, n=100)
                for each in zip(*seconds[f"{name}, {beside}"], strict=True)
            )
            cells += [f"{share * 1e3:.3f}" for share in (wall[49], wall[98], cpu[98])]
        rows.append((*cells, f"goal: {GOAL_MS:g} ms"))
    headings = [
        f"{share}, {beside}"
        for beside in BESIDE
        for share in ("p50", "p99", "p99 of the processor")
    ]
    return Section(
        f"vLLM's scheduler: calls of LMCacheTier for {NUM_KEYS} keys, milliseconds",
        ("call", *headings, "held against"),
        rows,
    )
