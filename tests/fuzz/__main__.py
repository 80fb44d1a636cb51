"""`make fuzz`: coverage-guided fuzzing of everything that decodes bytes from elsewhere, one target
after the other, and a table.

Python code is instrumented. Machine code of the loops is not: the targets that use it run twice,
the second time with the loops as plain Python over arrays that check every index (slower by some
hundred times, but seen).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("build/fuzz")
TARGETS = ("containers", "blobs", "gpu-outputs", "record-heads", "messages", "pods")
WITH_LOOPS = ("blobs", "gpu-outputs")
MAX_INPUT_BYTES = 6000
MAX_INPUT_SECONDS = 20
MAX_RESIDENT_MIB = 3072
STATUS = re.compile(r"^#(\d+)\s+\S+\s+cov: (\d+) ft: (\d+) corp: (\d+)/")


@dataclass(frozen=True)
class Outcome:
    """What came of one target.

    Attributes:
        name: Its name.
        num_runs: How often it was called.
        num_edges: Edges of instrumented code that were reached.
        num_features: These, distinguished by how often.
        num_inputs: Inputs that were kept, since each reaches something new.
        finding: The file with what it failed at, and the end of its output; empty if nothing was
            found.
    """

    name: str
    num_runs: int
    num_edges: int
    num_features: int
    num_inputs: int
    finding: str


def fuzz(name: str, seconds: int, has_plain_loops: bool) -> Outcome:
    """Fuzz one target in a process of its own, on from what earlier runs have kept."""
    title = f"{name}, plain loops" if has_plain_loops else name
    directory = DIRECTORY / title.replace(", ", "-").replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.one_target",
        name,
        *(["--plain-loops"] if has_plain_loops else []),
        str(directory / "corpus"),
    ]
    command += [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={MAX_INPUT_SECONDS}",
    ]
    command += [
        f"-rss_limit_mb={MAX_RESIDENT_MIB}",
        f"-artifact_prefix={directory}/",
        "-print_final_stats=1",
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    (directory / "log").write_text(done.stdout, encoding="utf-8")
    status = [
        tuple(map(int, match.groups()))
        for line in done.stdout.splitlines()
        if (match := STATUS.match(line))
    ]
    runs = status[-1] if status else (0, 0, 0, 0)
    finding = (
        ""
        if done.returncode == 0 and status
        else f"{directory}/log\n" + "\n".join(done.stdout.splitlines()[-40:])
    )
    return Outcome(title, *runs, finding)


def main(arguments: list[str]) -> int:
    """Fuzz the targets that are asked for; 1 if anything was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help=f"one or more of {', '.join(TARGETS)}; default: all",
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each; default: %(default)s")
    options = parser.parse_args(arguments)
    if not set(options.targets) <= set(TARGETS) or options.seconds < 1:
        parser.error(f"targets are {', '.join(TARGETS)}, and each takes at least one second")
    chosen = options.targets or TARGETS
    findings = []
    print(f"{'target':<26}{'executions':>12}{'edges':>8}{'features':>10}{'inputs':>8}", flush=True)
    for name, has_plain_loops in [
        (name, plain)
        for name in chosen
        for plain in (False, True)
        if not plain or name in WITH_LOOPS
    ]:
        outcome = fuzz(name, options.seconds, has_plain_loops)
        print(
            f"{outcome.name:<26}{outcome.num_runs:>12,}{outcome.num_edges:>8}{outcome.num_features:>10}{outcome.num_inputs:>8}"
            f"{'   FAILED' if outcome.finding else ''}",
            flush=True,
        )
        findings += [outcome] if outcome.finding else []
    for outcome in findings:
        print(f"\n{outcome.name}: {outcome.finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
