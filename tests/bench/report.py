"""Tables, and the generated sections of docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.measure import ROUNDS, Figure

ON_CORES = f"Python {platform.python_version()}, {os.cpu_count()} cores."
MACHINE = f"Machine: {platform.machine()}, 1 torch thread, {ON_CORES}"
WITH_ROUNDS = f"{MACHINE} Medians of {ROUNDS} rounds."
SIMULATED = "Simulated: nothing is timed."


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        headings: Of its columns. The first and the last are text, those between are numbers; a last
            one without a heading and cells makes all others numbers.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def as_markdown(self) -> str:
        """Return the table without empty columns."""
        last = len(self.headings) - 1
        shown = [i for i in range(last + 1) if any(row[i] for row in self.rows)]
        marks = ["---:" if 0 < i < last else "---" for i in shown]
        lines = [
            f"### {self.title}",
            "",
            "| " + " | ".join(self.headings[i] for i in shown) + " |",
            "|" + "|".join(marks) + "|",
        ]
        lines += ["| " + " | ".join(row[i] for i in shown) + " |" for row in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True)
class Findings:
    """What a part of the bench has found.

    Attributes:
        sections: Its tables.
        remarks: Sentences below them, as of other load on the machine.
        machine: First paragraph of its section.
        plot: File below docs/, its text for those who do not see it, and its SVG.
        is_whole: Whether all of the section was measured; otherwise nothing is written.
    """

    sections: Sequence[Section]
    remarks: Sequence[str] = ()
    machine: str = MACHINE
    plot: tuple[str, str, str] | None = None
    is_whole: bool = True


def rates(title: str, figures: Sequence[Figure]) -> Section:
    """Return a table of rates and their shares of their references."""
    rows = [
        (
            figure.name,
            f"{figure.rate:.2f}",
            "" if figure.share is None else f"{figure.share:.2f}",
            "",
        )
        for figure in figures
    ]
    return Section(title, ("what", "GB/s", "share of reference", ""), rows)


def rewrite(document: Path, name: str, machine: str, blocks: Sequence[str]) -> None:
    """Replace a generated section; the text around it is written by hand.

    Args:
        name: Of the section, as the comments around it name it.
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
    section = "\n\n".join([machine, *blocks])
    document.write_text(f"{before}{begin}\n{section}\n{end}{after}", encoding="utf-8")
