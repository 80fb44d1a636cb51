"""`python -m tests.chaos.cluster`: a run of the length that is asked for, told as it goes."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.cluster.plan import make_plan
from tests.chaos.cluster.report import write
from tests.chaos.cluster.run import Run, Times

WARM_UP_S, AFTER_S = 25.0, 20.0
PACE_S = 1.5
DOCS = Path(__file__).resolve().parents[3] / "docs"


def main() -> int:
    """0: nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="replay the plan of an earlier run")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long there are faults")
    parser.add_argument(
        "--directory", type=Path, help="where logs stay; by default they are removed"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="rewrite the part of docs/benchmarks.md that tells of it",
    )
    arguments = parser.parse_args()
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    times = Times(WARM_UP_S, arguments.seconds, AFTER_S)
    plan = make_plan(seed, arguments.seconds, PACE_S)
    print(f"SEED={seed}: {len(plan)} faults in {arguments.seconds:.0f} s", flush=True)
    begin_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin_s:6.1f}] {line}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        outcome = Run(directory, plan, seed, times, say).go()
    for fault in outcome.wrong:
        print(f"WRONG: {fault}")
    ratios = (
        f"hit ratio before {outcome.hit_before:.2f}, during {outcome.hit_during:.2f}, after"
        f" {outcome.hit_after:.2f}"
    )
    print(f"{ratios}; healed within {outcome.healed_s:.1f} s")
    print(
        f"{outcome.num_requests} requests, {outcome.num_calls} calls, the longest"
        f" {outcome.longest_s:.2f} s; misses {outcome.misses}"
    )
    print(
        f"{outcome.num_flips} bits turned, {outcome.num_cut} connections cut; SEED={seed}"
        " replays it"
    )
    if arguments.report and outcome.hits:
        write(DOCS, outcome)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
