"""What `lmcachectl drain` prints for people when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_ctl.drain.watching import DrainOutcome
from lmcache_ctl.output import UNKNOWN, Columns, print_table, print_text

FIGURES = ("total", "handed_over", "already_elsewhere", "failed", "left")


def print_drains(found: Sequence[DrainOutcome]) -> None:
    """A line for each, and what went wrong."""
    rows = [
        (
            one.kind,
            one.name,
            UNKNOWN if one.drain is None else one.drain.state,
            *(
                UNKNOWN if one.drain is None else str(getattr(one.drain, figure))
                for figure in FIGURES
            ),
        )
        for one in found
    ]
    headings = (
        "service",
        "name",
        "state",
        "chunks",
        "handed over",
        "elsewhere already",
        "failed",
        "left",
    )
    print_table(
        "",
        Columns(headings, left=3, spare=("elsewhere already", "handed over", "chunks", "service")),
        rows,
    )
    for one in found:
        if one.problem:
            print_text(f"{one.kind} {one.name}: {one.problem}")
