"""What `lmcachectl bench` prints for people."""

from __future__ import annotations

from lmcache_ctl.bench.report import Load, Phase, Report
from lmcache_ctl.output import UNKNOWN, Columns, count_text, print_table, print_text, size_text


def print_report(found: Report) -> None:
    """A line for each phase, then what went wrong."""
    load = found.load
    headings = ("", "calls", "calls/s", "chunks", "MiB/s", "p50 ms", "p90 ms", "p99 ms", "max ms")
    print_table(
        f"{load.target} {load.url}: {_what(load)}",
        Columns(headings),
        [_row(phase) for phase in found.phases],
    )
    for phase in found.phases:
        for reason, number in phase.not_done.items():
            print_text(f"{phase.name}: {number} chunks: {reason}")
        for reason, number in phase.failed_calls.items():
            print_text(f"{phase.name}: {number} calls failed: {reason}")
    print_text(
        "No call is faster than a round trip: what is above that is the server, and the bytes on"
        " their way."
    )
    print_text(
        f"{found.num_removed} chunks removed"
        + (f", {found.num_left} are LEFT" if found.num_left else ", none is left")
    )


def _what(load: Load) -> str:
    chunks = f"{load.num_chunks} chunks" + (
        f" of {size_text(load.chunk_bytes)}" if load.chunk_bytes else ""
    )
    return f"{chunks}, {load.batch} in a call, {load.concurrency} calls at once"


def _row(phase: Phase) -> tuple[str, ...]:
    latency = phase.latency_ms
    times = (
        (UNKNOWN,) * 4
        if latency is None
        else tuple(f"{one:.2f}" for one in (latency.p50, latency.p90, latency.p99, latency.max))
    )
    chunks = UNKNOWN if phase.is_of_the_way else str(phase.num_chunks)
    speed = f"{phase.bytes_per_s / (1 << 20):.0f}" if phase.num_bytes else UNKNOWN
    return phase.name, str(phase.num_calls), count_text(phase.calls_per_s), chunks, speed, *times
