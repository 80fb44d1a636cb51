"""Run many seeds, each in its own process; print their coverage; shrink a schedule."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.simulation.__main__ import FIXED

ROOT = Path(__file__).resolve().parents[2]
KNOWN_SEEDS = (2, 4, 1223285715)
"""Runs of 300 s that violated something once, and meet many faults for their time. What was found
has tests of its own; with each change of the product these seeds tell other stories.
"""
OTHER_KNOWN_RUNS = (
    (30, 80.0),
    (101, 14400.0),
    (1325379166, 14400.0),
    (315659006, 36000.0),
    (315659019, 36000.0),
)
"""The same with other lengths: seed and virtual seconds."""
NUM_FRESH = 5
MAX_PROCESSOR_S = 900
"""A run that takes more processor time has hung."""
MAX_S = 4.0 * MAX_PROCESSOR_S
"""Longest run by the clock; other work may share the processors."""
Result = dict[str, Any]


def run_seed(
    seed: int,
    seconds: float,
    keep: Collection[int] | None = None,
    path: str | None = None,
    max_processor_s: int = MAX_PROCESSOR_S,
    only_first: bool = False,
    is_warm: bool = False,
) -> Result:
    """Run one seed in its own process.

    Args:
        seed: Seed of the run.
        seconds: Virtual time under faults.
        keep: Numbers of the faults to keep; None: all.
        path: Import path of the product; None: that of this process.
        max_processor_s: Processor time after which the run is ended.
        only_first: End soon after the first violation.
        is_warm: Whether the product's machine code has been compiled: the run need not find out.

    Returns:
        The output of `--json`; a run that had to be stopped has a violation that says so.
    """
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed)]
    command += ["--seconds", f"{seconds:g}", "--processor-s", str(max_processor_s), "--json"]
    if only_first:
        command.append("--first")
    if keep is not None:
        command += ["--keep", ",".join(map(str, sorted(keep)))]
    environment = os.environ | {"PYTHONPATH": path or os.pathsep.join(filter(None, sys.path))}
    if is_warm:
        environment |= FIXED
    result: Result = {"seed": seed, "seconds": seconds}
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=ROOT if path is None else path.split(os.pathsep)[0],
            capture_output=True,
            text=True,
            timeout=MAX_S,
        )
    except subprocess.TimeoutExpired:
        return result | {"violations": [f"the run has not ended in {MAX_S:g} s"]}
    if done.returncode == -signal.SIGXCPU:
        text = f"the run has not ended in {max_processor_s} s of processor time"
        return result | {"violations": [text]}
    try:
        return result | json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return result | {"violations": [f"the run crashed: {done.stdout}{done.stderr}"]}


def fresh_seeds(number: int) -> list[int]:
    """Return seeds that are new for each state of the product, and the same on all machines."""
    digest = hashlib.blake2b(digest_size=4)
    for folder in ("libs", "services"):
        for path in sorted((ROOT / folder).glob("*/src/**/*.py")):
            digest.update(path.read_bytes())
    first = int.from_bytes(digest.digest(), "big") >> 1
    return list(range(first, first + number))


def replay(result: Result, keep: Collection[int] | None = None) -> str:
    """Return the command that repeats a run."""
    command = f"make sim SEED={result['seed']} SECONDS={result['seconds']:g}"
    return command if keep is None else f"{command} KEEP={','.join(map(str, sorted(keep)))}"


def run_seeds(runs: Iterable[tuple[int, float]], jobs: int) -> list[Result]:
    """Run seeds, each for its virtual seconds, in parallel; print a line for each, and its
    violations.
    """
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(lambda run: run_seed(*run), runs):
            results.append(result)
            num_faults = sum(result.get("faults", {}).values())
            print(
                f"seed={result['seed']} virtual_s={result.get('virtual_s', 0)}"
                f" processor_s={result.get('processor_s', 0)} faults={num_faults}"
                f" violations={len(result['violations'])}",
                *_broken(result),
                sep="\n",
                flush=True,
            )
    return results


def _broken(result: Result) -> list[str]:
    """Return lines about what a run violated; none for a good run."""
    lines = [f"  VIOLATION {text}" for text in result["violations"]]
    return [*lines, f"  replay: {replay(result)}"] if lines else []


def summary(results: Collection[Result]) -> str:
    """Return a table of operations that met each kind of fault, what was violated, and figures."""
    pairs: Counter[tuple[str, str]] = Counter()
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for result in results:
        faults.update(result.get("faults", {}))
        totals.update(result.get("totals", {}))
        for kind, operation, number in result.get("pairs", ()):
            pairs[kind, operation] += number
    virtual_s = sum(result.get("virtual_s", 0) for result in results)
    processor_s = sum(result.get("processor_s", 0) for result in results)
    operations = sorted({operation for _, operation in pairs})
    lines = [f"{'':18}{'faults':>8}" + "".join(f"{place:>6}" for place in range(len(operations)))]
    for kind, number in sorted(faults.items()):
        cells = "".join(f"{pairs[kind, operation] or '.':>6}" for operation in operations)
        lines.append(f"{kind:18}{number:>8}{cells}")
    lines += [f"{place:>6}: {operation}" for place, operation in enumerate(operations)]
    for result in results:
        lines += _broken(result)
    by_engines = sorted(name for name in totals if "/" not in name)
    lines.append(" ".join(f"{name}={totals[name]}" for name in by_engines))
    num_failed = sum(bool(result["violations"]) for result in results)
    lines.append(
        f"seeds={len(results)} failed={num_failed} virtual_hours={virtual_s / 3600:.2f}"
        f" processor_s={processor_s:.0f} speed={virtual_s / max(processor_s, 1e-9):.0f}"
        f" faults={sum(faults.values())} pairs={len(pairs)}"
    )
    return "\n".join(lines)


def shrink(numbers: Collection[int], fails: Callable[[Collection[int]], bool]) -> list[int]:
    """Return a part of a schedule that still fails, but passes without any one of its faults.

    Halves, quarters and so on are left out first.

    Args:
        numbers: Numbers of the faults with which the run fails.
        fails: Returns whether a run with only these faults fails.
    """
    kept = sorted(numbers)
    size = max(1, len(kept) // 2)
    while kept:
        for at in range(0, len(kept), size):
            rest = kept[:at] + kept[at + size :]
            if fails(rest):
                kept = rest
                size = min(size, max(1, len(kept)))
                break
        else:
            if size == 1:
                break
            size //= 2
    return kept
