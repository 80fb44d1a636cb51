"""`python -m tests.gpu.table gpu.jsonl`: put the figures into the part `gpu` of
`docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.report import rewrite
from tests.gpu.report import read_lines

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks.md"


def section_of(lines: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the machine in one sentence, and a table with a row for each rate."""
    facts = {line["name"]: line for line in lines if line["part"] == "facts"}
    machine = facts.get("nvidia-smi", facts.get("GPU", {})).get("text", "unknown GPU")
    torch = facts.get("torch", {}).get("text", "?")
    rows = [
        f"| {line['name']} | {line['rate']:.1f} |"
        f" {'' if line['share'] is None else format(line['share'], '.2f')} |"
        for line in lines
        if "rate" in line
    ]
    outcomes = [line for line in lines if line["name"] == "outcome"]
    notes = ", ".join(f"{line['part']} {line['text'].splitlines()[-1]}" for line in outcomes)
    head = ["| what | GB/s | share of its limit |", "|---|---:|---:|"]
    return f"{machine}; torch {torch}. Parts: {notes}.", "\n".join([*head, *rows])


def main() -> int:
    """Rewrite the page."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("usage: python -m tests.gpu.table FILE, where FILE is a gpu.jsonl", file=sys.stderr)
        return 2
    machine, table = section_of(read_lines(Path(sys.argv[1])))
    rewrite(PAGE, "gpu", machine, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
