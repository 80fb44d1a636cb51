"""What was measured, as tables for the terminal and as the generated section of
docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.allocation import NUM_LIVE, PairCost
from tests.bench.identity import NamingCost
from tests.bench.measure import Figure
from tests.bench.questions import AnswerTime
from tests.bench.small_chunks import ChunkCost

TERMINAL_ONLY = frozenset(
    {
        "slowest … fastest",
        "fastest … slowest",
        "fastest … nine in ten",
        "encode, slowest … fastest",
        "decode, slowest … fastest",
        "what limits it",
        "what it is made of",
        "held against",
        "bits count",
        "computed",
        "over full recompute",
        "divergence, nats",
        "TFLOP",
        "loss, nats an answer",
        "gap closed, ±",
        "ratio",
        "share of a copy",
        "times torchac",
        "deviation of K and V",
        "raw bytes",
        "growth",
        "loss, bits a byte",
        "KL, nats",
        "times torchac -O3",
        "times one thread",
        "encode and load, one after the other",
        "encode and load, pipelined",
        "limit: torch copy, one thread, taken in turn with the paged copies",
        "one server: the buckets alone",
        "cluster: buckets of its masters",
        "vLLM waits in the scheduler",
        "CPU time of a cold request",
        "storing adds to it",
        "CPU time of a store: vLLM",
        "CPU time of a store: sidecar",
        "bits turned",
        "connections cut",
        "bare echo of the same bytes, MessagePack",
        "bare echo of the same bytes, JSON",
        "bare echo, MessagePack",
        "bare echo, JSON",
        "cores busy with other work",
        "all three can do a second on idle cores",
    }
)
"""Headings of columns, and first cells of rows, that the document leaves out."""


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        title: Its heading.
        headings: Of its columns; the first and the last are text, those between are numbers.
        rows: Its cells.
        left_out: A row with one of these cells is not in the document.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    left_out: frozenset[str] = frozenset()

    def show(self, console: Console) -> None:
        """Print it."""
        table = Table(title=self.title)
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if 0 < i < len(self.headings) - 1 else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def as_markdown(self) -> str:
        """Return the table for the document: without empty columns and without `TERMINAL_ONLY`."""
        last = len(self.headings) - 1
        shown = [
            i
            for i, heading in enumerate(self.headings)
            if heading not in TERMINAL_ONLY and any(row[i] for row in self.rows)
        ]
        marks = ["---:" if 0 < i < last else "---" for i in shown]
        lines = [
            f"### {self.title}",
            "",
            "| " + " | ".join(self.headings[i] for i in shown) + " |",
            "|" + "|".join(marks) + "|",
        ]
        return "\n".join(
            [
                *lines,
                *(
                    "| " + " | ".join(row[i] for i in shown) + " |"
                    for row in self.rows
                    if row[0] not in TERMINAL_ONLY and self.left_out.isdisjoint(row)
                ),
            ]
        )


def rates(title: str, figures: Sequence[Figure]) -> Section:
    """Bytes moved, held against what the machine can do."""
    rows = []
    for figure in figures:
        low, high = figure.spread
        share = "" if figure.share is None else f"{figure.share:.2f}"
        rows.append(
            (figure.name, f"{figure.rate:.2f}", f"{low:.2f} … {high:.2f}", share, figure.note)
        )
    return Section(
        title, ("what", "GB/s", "slowest … fastest", "share of its limit", "what limits it"), rows
    )


def naming(costs: Sequence[NamingCost]) -> Section:
    """Hashes, keys, lookups."""
    rows = []
    for cost in costs:
        low, high = cost.spread_ms
        times = "" if cost.times is None else f"{cost.times:.2f}"
        goal = "" if cost.goal is None else f"{cost.goal:g}"
        rows.append(
            (cost.name, f"{cost.elapsed_ms:.2f}", f"{low:.2f} … {high:.2f}", times, goal, cost.note)
        )
    return Section(
        "Naming tokens",
        ("what", "ms", "fastest … slowest", "times its limit", "goal", "held against"),
        rows,
    )


def answers(times: Sequence[AnswerTime]) -> Section:
    """Lookup and stage."""
    rows = []
    for time in times:
        low, high = time.spread_ms
        goal = "" if time.goal_ms is None else f"{time.goal_ms:g}"
        rows.append(
            (time.name, f"{time.elapsed_ms:.2f}", f"{low:.2f} … {high:.2f}", goal, time.note)
        )
    return Section(
        "Scheduler queries",
        ("what", "ms", "fastest … nine in ten", "goal", "what it is made of"),
        rows,
    )


def allocations(costs: Sequence[PairCost]) -> Section:
    """Allocate and free."""
    rows = []
    for cost in costs:
        low, high = cost.spread_us
        ratio = "" if cost.ratio is None else f"{cost.ratio:.2f} times that among {NUM_LIVE[0]:,}"
        rows.append(
            (
                f"{cost.name}, {cost.num_live:,} live",
                f"{cost.pair_us:.2f}",
                f"{low:.2f} … {high:.2f}",
                ratio,
            )
        )
    return Section(
        "Memory: one allocate and one free",
        ("blocks", "µs a pair", "fastest … slowest", "growth"),
        rows,
    )


def chunk_costs(costs: Sequence[ChunkCost]) -> Section:
    """Chunks whose bytes cost next to nothing."""
    return Section(
        "A chunk of 1 KiB in host memory",
        ("what", "µs a chunk", "goal", "objects a chunk"),
        [
            (cost.name, f"{cost.chunk_us:.1f}", f"{cost.goal_us:g}", f"{cost.objects:.1f}")
            for cost in costs
        ],
    )


def rewrite(document: Path, name: str, machine: str, blocks: Sequence[str]) -> None:
    """Replace a generated section; the text around it is written by hand.

    Args:
        document: Where it stands.
        name: Of the section, as the comments around it say it.
        machine: Its first paragraph.
        blocks: The rest of it.

    Raises:
        ValueError: The document has no such section.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = document.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{document} has no section between {begin} and {end}")
    before, rest = text.split(begin, 1)
    _, after = rest.split(end, 1)
    document.write_text(
        f"{before}{begin}\n" + "\n\n".join([machine, *blocks]) + f"\n{end}{after}", encoding="utf-8"
    )
