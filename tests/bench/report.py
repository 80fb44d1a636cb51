"""Figures as a table for the terminal and as a section of docs/benchmarks.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tests.bench.measure import ROUNDS, Figure

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def as_table(figures: Sequence[Figure]) -> Table:
    """For the terminal."""
    table = Table(title="4,096 tokens, Llama-3.1-8B shape, bf16: 512 MiB")
    for heading in ("what", "GB/s", "slowest … fastest", "share of limit"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for figure in figures:
        low, high = figure.spread
        share = "" if figure.share is None else f"{figure.share:.2f}"
        table.add_row(figure.name, f"{figure.rate:.2f}", f"{low:.2f} … {high:.2f}", share)
    return table


def rewrite(document: Path, figures: Sequence[Figure], machine: str) -> None:
    """Replace the generated section; the text around it is written by hand.

    Raises:
        ValueError: The document has no such section.
    """
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{document} has no section between {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    lines = [
        f"Machine: {machine}, {os.cpu_count()} cores. Medians of {ROUNDS} rounds.",
        "",
        "| what | GB/s | slowest … fastest | share of its limit | what limits it |",
        "|---|---:|---:|---:|---|",
    ]
    for figure in figures:
        low, high = figure.spread
        share = "" if figure.share is None else f"{figure.share:.2f}"
        lines.append(f"| {figure.name} | {figure.rate:.2f} | {low:.2f} … {high:.2f} | {share} | {figure.note} |")
    document.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")
