"""`python -m tests.gpu`: run the parts, each in a process with a deadline.

Exit codes: 0 all parts passed; 1 wrong bytes, whatever else failed; 2 wrong usage; 3 a part failed
otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu.kernels import described
from tests.gpu.report import Report, WrongBytes, read_lines

PARTS = {
    "facts": 45,
    "kernels": 200,
    "connectors": 35,
    "streams": 100,
    "faults": 60,
    "figures": 100,
    "vllm": 580,
    "sglang": 300,
}
"""Longest time in seconds, by part, in the order in which they run: those of engines, each, and all
others together, fit into 600 s with some room.
"""
DRY_PATIENCE = 10
"""How many times as long a part may take in a dry run: a busy machine without a GPU is slow."""
WRONG, FAILED = 1, 3
FILE_NAME = "gpu.jsonl"


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name parts, kernels and profiles")
    parser.add_argument("--parts", help="only these, with commas between them", metavar="NAMES")
    parser.add_argument("--since", choices=PARTS, help="this part and those after it")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        help=f"directory of {FILE_NAME}, appended to (default: %(default)s)",
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        for name, limit_s in PARTS.items():
            print(f"{name} (at most {limit_s} s)")
        print("\n".join(described()))
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry-run runs on the CPU")
    chosen = options.parts.split(",") if options.parts else list(PARTS)
    if unknown := sorted(set(chosen) - set(PARTS)):
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.since:
        names = list(PARTS)
        chosen = [name for name in chosen if names.index(name) >= names.index(options.since)]
    options.out.mkdir(parents=True, exist_ok=True)
    path, device = options.out / FILE_NAME, "cpu" if options.dry_run else "cuda"
    if options.part:
        return run_part(Report(path, options.part, device))
    patience = DRY_PATIENCE if options.dry_run else 1
    return worst([run_apart(Report(path, name, device), patience * PARTS[name]) for name in chosen])


def worst(codes: Sequence[int]) -> int:
    """Return the code of all: no other failure hides a wrong byte."""
    return WRONG if WRONG in codes else max(codes, default=0)


def run_part(report: Report) -> int:
    """Run one part in this process. Other exceptions than wrong bytes end it."""
    began = time.monotonic()
    try:
        importlib.import_module(f"tests.gpu.{report.part}").run(report)
    except WrongBytes as exc:
        report.note("outcome", text=f"wrong bytes: {exc}", code=WRONG)
        return WRONG
    report.note("outcome", text="passed", seconds=round(time.monotonic() - began, 1), code=0)
    return 0


def run_apart(report: Report, limit_s: float, command: Sequence[str] = ()) -> int:
    """Run one part in a process of its own, and kill it with all its children at its limit.

    Args:
        report: Of that part.
        limit_s: Its limit.
        command: What to run instead.
    """
    if not command:
        command = [sys.executable, "-W", "default", "-m", "tests.gpu", "--part", report.part]
        command += ["--out", str(report.path.parent), *(["--dry-run"] if report.is_dry else [])]
    num_before = len(read_lines(report.path))
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = FAILED
        report.note("outcome", text=f"killed after {limit_s} s", code=code)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = read_lines(report.path)[num_before:]
    outcomes = {line["code"]: line["text"] for line in lines if line["name"] == "outcome"}
    if not outcomes:
        outcomes[FAILED] = f"ended with code {process.returncode}"
        report.note("outcome", text=outcomes[FAILED], code=FAILED)
    text = ", ".join(outcomes.values())
    print(f"{report.part}: {text} ({len(lines)} lines in {report.path})", flush=True)
    return worst([FAILED if code else 0, *outcomes])


if __name__ == "__main__":
    sys.exit(main())
