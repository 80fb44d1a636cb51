"""What `lmcachectl bench` prints for people."""

from __future__ import annotations

from lmcache_ctl.bench.report import Phase, Report
from lmcache_ctl.output import UNKNOWN, print_table, print_text, size_text


def print_report(found: Report) -> None:
    """A line for storing and one for fetching, then what went wrong."""
    load = found.load
    what = f"{load.num_chunks} chunks of {size_text(load.chunk_bytes)}, {load.batch} in a call, {load.concurrency} calls at once"
    headings = ("", "calls", "chunks", "MiB/s", "p50 ms", "p90 ms", "p99 ms", "max ms")
    print_table(f"{load.url}: {what}", headings, [_row(phase) for phase in found.phases])
    for phase in found.phases:
        for reason, number in phase.not_done.items():
            print_text(f"{phase.name}: {number} chunks: {reason}")
        for reason, number in phase.failed_calls.items():
            print_text(f"{phase.name}: {number} calls failed: {reason}")
    print_text(f"{found.num_removed} chunks removed" + (f", {found.num_left} are LEFT" if found.num_left else ", none is left"))


def _row(phase: Phase) -> tuple[str, ...]:
    latency = phase.latency_ms
    times = (UNKNOWN,) * 4 if latency is None else tuple(f"{one:.1f}" for one in (latency.p50, latency.p90, latency.p99, latency.max))
    return phase.name, str(phase.num_calls), str(phase.num_chunks), f"{phase.bytes_per_s / (1 << 20):.0f}", *times
