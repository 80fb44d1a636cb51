"""Run the cluster in a simulation: `python -m tests.simulation --seed 7`."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys

ADDR_NO_RANDOMIZE = 0x0040000
FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
end = os._exit


def main() -> int:
    """Run one seed; the exit code is 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="decides everything")
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual time under faults")
    parser.add_argument("--logs", action="store_true", help="print what the services log")
    parser.add_argument("--events", action="store_true", help="print the event log")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | FIXED,
        )
    import time

    import faulthandler

    faulthandler.dump_traceback_later(400, repeat=True)
    cpu_s = time.process_time
    from tests.simulation.world import World

    world = World(options.seed)
    if options.events:
        world.kernel.log_lines = []
    from tests.simulation.scenario import Scenario

    scenario = Scenario(world, options.seed, options.seconds)
    begin_s = cpu_s()
    violations = scenario.run()
    took_s = cpu_s() - begin_s
    if options.logs:
        print("\n".join(world.logs))
    print("\n".join(world.kernel.log_lines or []))
    totals = {node: dict(engine.totals) for node, engine in scenario.engines.items()}
    print(
        f"seed={options.seed} virtual_s={world.kernel.now:.0f} processor_s={took_s:.1f}"
        f" speed={world.kernel.now / took_s:.0f} events={world.kernel.num_events}"
        f" digest={world.kernel.digest} faults={dict(scenario.counts)} engines={totals}"
    )
    for text in violations:
        print(f"VIOLATION {text}")
    world.files.close()
    return 1 if violations else 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    end(code)
