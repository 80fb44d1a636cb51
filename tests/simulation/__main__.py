"""Run the whole cluster in one process, in virtual time, from a seed: `make sim SEED=7`."""

from __future__ import annotations

import argparse
import json
import os
import sys

FIXED = {
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""What would make two runs of a seed differ."""


def main() -> int:
    """Run one seed; the exit status is 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="decides everything")
    which.add_argument(
        "--known",
        action="store_true",
        help="seeds that failed once, and some that follow from the product's sources",
    )
    which.add_argument("--hours", type=float, help="virtual time of fresh seeds, side by side")
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="virtual time under faults; long runs are mostly quiet",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="with --hours and --known"
    )
    parser.add_argument("--processor-s", type=int, help="end after this much processor time")
    parser.add_argument("--shrink", action="store_true", help="leave out what need not go wrong")
    parser.add_argument(
        "--keep", type=_numbers, help="numbers of the faults to keep, with commas; default: all"
    )
    parser.add_argument("--first", action="store_true", help="end soon after the first violation")
    parser.add_argument("--list", action="store_true", help="print the schedule and end")
    parser.add_argument("--events", action="store_true", help="print the event log")
    parser.add_argument("--logs", action="store_true", help="print what the services log")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    options = parser.parse_args()
    if options.hours is not None or options.known:
        return _run_many(options)
    if options.shrink:
        return _shrink(options)
    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        # A run in which loops are compiled differs from the next one, which finds them compiled.
        from lmcache_core.serde.warm_up import warm_up

        warm_up()
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | FIXED)
    return _run(options, options.keep)


def _numbers(text: str) -> set[int]:
    try:
        return {int(number) for number in text.split(",") if number}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers; give them with commas, such as 3,8"
        ) from None


def _run_many(options: argparse.Namespace) -> int:
    import random

    from tests.simulation.many import (
        KNOWN_SEEDS,
        NUM_FRESH,
        OTHER_KNOWN_RUNS,
        fresh_seeds,
        run_seeds,
        summary,
    )
    from tests.simulation.pace import pace_of

    if options.known:
        seeds = [*KNOWN_SEEDS, *fresh_seeds(NUM_FRESH)]
        runs = [*((seed, options.seconds) for seed in seeds), *OTHER_KNOWN_RUNS]
    else:
        # A run also takes a minute to begin and to end.
        run_s = options.seconds + pace_of(options.seconds).calm_s + 60
        num_seeds = max(1, round(options.hours * 3600 / run_s))
        first = random.SystemRandom().randrange(1 << 31)
        runs = [(seed, options.seconds) for seed in range(first, first + num_seeds)]
    results = run_seeds(runs, options.jobs)
    print(summary(results))
    return 1 if any(result["violations"] for result in results) else 0


def _shrink(options: argparse.Namespace) -> int:
    from collections.abc import Collection

    from tests.simulation.many import replay, run_seed, shrink

    result = run_seed(options.seed, options.seconds)
    if not result["violations"]:
        print(f"seed {options.seed} violates nothing in {options.seconds:g} s")
        return 0

    def fails(keep: Collection[int]) -> bool:
        violations = run_seed(options.seed, options.seconds, keep)["violations"]
        print(f"faults={len(keep)} violations={len(violations)}", flush=True)
        return bool(violations)

    kept = shrink(range(sum(result["faults"].values())), fails)
    print(f"replay: {replay(result, kept)}")
    return 1


def _run(options: argparse.Namespace, keep: set[int] | None) -> int:
    import resource
    import time

    if options.processor_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (options.processor_s, resource.RLIM_INFINITY))
    processor_s = time.process_time  # before the world has its own clocks
    from tests.simulation.pace import pace_of
    from tests.simulation.world import World

    world = World(options.seed, pace_of(options.seconds))
    from tests.simulation.faults import draw_schedule, kept
    from tests.simulation.scenario import Scenario

    schedule = kept(draw_schedule(options.seed, options.seconds), keep)
    if options.list:
        for fault in schedule:
            print(f"{fault.number:4} {fault.at_s:8.2f} {fault.kind}")
        world.files.close()
        return 0
    if options.events:
        world.kernel.log_lines = []
    scenario = Scenario(world, options.seed, options.seconds, schedule, options.first)
    begin_s = processor_s()
    violations = scenario.run()
    # A run that ends at its first violation may do so within a command whose output is collected.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    took_s = processor_s() - begin_s
    for line in (*(world.kernel.log_lines or ()), *(world.logs if options.logs else ())):
        print(line)
    result = {
        "seed": options.seed,
        "virtual_s": round(world.kernel.now),
        "processor_s": round(took_s, 1),
        "events": world.kernel.num_events,
        "digest": world.kernel.digest,
        "faults": dict(scenario.faults.counts),
        "totals": dict(scenario.totals),
        "pairs": [[*pair, number] for pair, number in sorted(scenario.pairs.items())],
        "violations": violations,
    }
    world.files.close()
    if options.json:
        print(json.dumps(result))
        return 1 if violations else 0
    for name, value in result.items():
        if name not in {"pairs", "violations"}:
            print(f"{name}: {value}")
    print(f"speed: {world.kernel.now / took_s:.0f} times real time")
    for text in violations:
        print(f"VIOLATION {text}")
    if violations:
        print(f"replay: make sim SEED={options.seed} SECONDS={options.seconds:g}")
    return 1 if violations else 0


if __name__ == "__main__":
    end = os._exit
    try:
        code = main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 2
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    end(code)  # finalisers of killed processes must never run
