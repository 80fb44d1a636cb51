"""`python -m tests.gpu.table gpu.jsonl`: put the figures into the part `gpu` of
`docs/benchmarks.md`, and the estimates of what was not measured; without a file all estimates. The
README follows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import readme
from tests.bench.report import rewrite
from tests.gpu.estimates import INTRODUCTION, table_of
from tests.gpu.report import read_lines

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks.md"


def section_of(lines: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the machine in one sentence, and the tables: a row for each rate, for each other
    figure, for each engine, and for each estimate that is left.
    """
    if not lines:
        return INTRODUCTION, [table_of([])]
    facts = {line["name"]: line for line in lines if line["part"] == "facts"}
    machine = facts.get("GPU", {}).get("text", "unknown GPU")
    if "nvidia-smi" in facts:
        name, driver, memory, speed, width, _ = (
            facts["nvidia-smi"]["text"].splitlines()[0].split(", ")
        )
        machine = f"{name}, {memory}, driver {driver}, PCIe {speed} x{width}"
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
    tables = ["\n".join([*head, *rows])]
    others = {line["name"]: value for line in lines if (value := _other(line))}
    if others:
        rows = [f"| {name} | {value} |" for name, value in others.items()]
        tables.append("\n".join(["| what | measured |", "|---|---:|", *rows]))
    engines = [line for line in lines if "ms" in line]
    if engines:
        names = list(engines[0]["ms"])
        version = next(line["text"] for line in lines if line["name"] == "vLLM")
        table = [f"| vLLM {version}, ms | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
        for line in engines:
            cells = (f"{line['ms'][name]:.1f}" for name in names)
            table.append(f"| {line['name']} | {' | '.join(cells)} |")
        tables.append("\n".join(table))
    rates = [line["name"] for line in lines if "rate" in line]
    left = table_of([*rates, *others, *(line["name"] for line in engines)])
    return f"{machine}; torch {torch}. Parts: {notes}.", [*tables, INTRODUCTION, left]


def _other(line: dict[str, Any]) -> str:
    """Return a figure that is no rate; "" if the line has none."""
    if "times_longer" in line:
        return f"{line['times_longer']:.2f} times longer"
    return f"{line['seconds']:.2f} s" if line.get("is_pinned") else ""


def main() -> int:
    """Rewrite the page."""
    files = [Path(name) for name in sys.argv[1:]]
    if len(files) > 1 or not all(file.is_file() for file in files):
        print("usage: python -m tests.gpu.table [FILE], a gpu.jsonl", file=sys.stderr)
        return 2
    machine, tables = section_of([line for file in files for line in read_lines(file)])
    rewrite(PAGE, "gpu", machine, tables)
    readme.rewrite(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
