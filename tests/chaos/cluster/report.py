"""What came out of a run, for docs/benchmarks.md."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.bench.report import Section, rewrite
from tests.chaos.cluster.plan import KINDS
from tests.chaos.cluster.plot import draw
from tests.chaos.cluster.run import Outcome
from tests.chaos.cluster.worker import BOUND_S

PLOT = "chaos-hit-ratio.svg"
SECTION = "chaos"
DONE = {
    "kill": "SIGKILL, restarted within 3 s",
    "stop": "SIGSTOP for up to 4 s",
    "flush": "FLUSHALL",
    "full": "disk refuses writes for up to 12 s",
    "cut": "all connections of an address closed",
    "delay": "traffic delayed by 10 to 300 ms, for up to 6 s",
    "freeze": "no traffic for up to 4 s",
    "corrupt": "a bit flipped in 5 to 50 % of the pieces, for up to 8 s",
}


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
    blocks = [figures(outcome).as_markdown(), faults(outcome).as_markdown(), f"![{title}]({PLOT})"]
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
        ("bits turned", f"{outcome.num_flips:,}", ""),
        ("connections cut", f"{outcome.num_cut:,}", ""),
    ]
    return Section("Chaos: what came out", ("what", "", "note"), rows)


def faults(outcome: Outcome) -> Section:
    """What was done, by kind."""
    counts = Counter(fault.kind for fault in outcome.plan)
    rows = [(kind, f"{counts[kind]}", f"{DONE[kind]} ({_families(kind)})") for kind in KINDS]
    return Section("Chaos: what was done", ("kind", "times", "what it is, and to whom"), rows)


def _families(kind: str) -> str:
    hit, every = (
        {target.split("-")[0] for one in kinds for target in KINDS[one].targets}
        for kinds in ([kind], KINDS)
    )
    return "all" if hit == every else ", ".join(sorted(hit))


def _sort_of(fault: str) -> str:
    """What a worker's words begin with, behind its time and name."""
    return next(
        (sort for sort in ("wrong", "error", "late") if f" {sort}: " in fault.split("\n", 1)[0]),
        "other",
    )
