"""What came out of a run, for docs/benchmarks.md."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.bench.report import Section, rewrite
from tests.chaos.cluster.plot import draw
from tests.chaos.cluster.run import Outcome
from tests.chaos.cluster.worker import BOUND_S

PLOT = "chaos-hit-ratio.svg"
SECTION = "chaos"


def write(docs: Path, outcome: Outcome) -> None:
    """Rewrite the section and the plot.

    Args:
        docs: The directory of documents.
        outcome: Of a run that came as far as its faults.

    Raises:
        ValueError: It did not, or the document has no such section.
    """
    title = (
        f"Hit ratio under {len(outcome.plan)} faults in {outcome.times.chaos_s:.0f} s, seed"
        f" {outcome.seed}"
    )
    (docs / PLOT).write_text(draw(outcome.hits, outcome.plan, title), encoding="utf-8")
    machine = (
        f"Seed {outcome.seed}, {outcome.times.chaos_s:.0f} s of faults, {os.cpu_count()} cores."
    )
    blocks = [figures(outcome).as_markdown(), f"![{title}]({PLOT})"]
    rewrite(docs / "benchmarks.md", SECTION, machine, blocks)


def figures(outcome: Outcome) -> Section:
    """What the workload and the services had to say."""
    wrong = Counter(_sort_of(fault) for fault in outcome.wrong)
    grown = {
        name: outcome.after[name].memory_mb - usage.memory_mb
        for name, usage in outcome.before.items()
        if name in outcome.after
    }
    worst = max(grown, key=lambda name: grown[name], default=None)
    rows = [
        (
            "requests of four engines",
            f"{outcome.num_requests:,}",
            f"{outcome.num_calls:,} calls of the engine",
        ),
        ("wrong KV", f"{wrong['wrong']}", "every token that came back was compared"),
        ("errors raised to an engine", f"{wrong['error']}", ""),
        (
            "calls past their bound",
            f"{wrong['late']}",
            f"{BOUND_S:g} s; the longest lasted {outcome.longest_s:.2f} s",
        ),
        (
            "anything else wrong",
            f"{wrong['other']}",
            "; ".join(text.splitlines()[0] for text in outcome.wrong if _sort_of(text) == "other"),
        ),
        (
            "hit ratio before the faults",
            f"{outcome.hit_before:.2f}",
            "of tokens that prompts share",
        ),
        ("during them", f"{outcome.hit_during:.2f}", ""),
        (
            "after them",
            f"{outcome.hit_after:.2f}",
            (
                f"what each engine stored, the next one found {outcome.healed_s:.1f} s after the"
                " last of them"
            ),
        ),
        ("largest growth of a service, MB", f"{grown[worst]:.0f}" if worst else "", worst or ""),
        (
            "chunks missed",
            f"{sum(outcome.misses.values()):,}",
            ", ".join(f"{reason} {num:,}" for reason, num in sorted(outcome.misses.items())),
        ),
    ]
    return Section("Chaos: results", ("what", "", "note"), rows)


def _sort_of(fault: str) -> str:
    """What a worker's words begin with, after its time and name."""
    return next(
        (sort for sort in ("wrong", "error", "late") if f" {sort}: " in fault.split("\n", 1)[0]),
        "other",
    )
