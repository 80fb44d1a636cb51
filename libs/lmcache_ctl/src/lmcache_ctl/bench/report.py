"""The load and the report of a bench, and how the report is shown."""

from __future__ import annotations

from typing import Final

import msgspec
from lmcache_core.names import MEMORY_TIER

from lmcache_ctl.errors import UsageError
from lmcache_ctl.output import UNKNOWN, Columns, print_table, print_text, size_text

SCHEMES: Final = ("lm://", "lm+tls://", "http://", "https://")
BENCH_NAME: Final = "lmcachectl-bench"
TIER: Final = MEMORY_TIER
MAX_CHUNK_BYTES: Final = 256 << 20
MAX_TOTAL_BYTES: Final = 64 << 30
MAX_CHUNKS: Final = 65_536
CONNECT: Final = "connect"
ROUND_TRIP: Final = "round trip"


class BenchLoad(msgspec.Struct, frozen=True):
    """The load to put on a service.

    Attributes:
        target: `storage` or `lookup`.
        url: Of the server that is measured.
        seconds: How long, all phases together.
        num_chunks: That are stored, or known to the index.
        chunk_bytes: Of each; 0 for lookups, which carry none.
        concurrency: Calls at once.
        batch: Chunks in a call.
    """

    target: str
    url: str
    seconds: float
    num_chunks: int
    chunk_bytes: int
    concurrency: int
    batch: int


class Latency(msgspec.Struct, frozen=True):
    """Of calls, milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Phase(msgspec.Struct, frozen=True):
    """One kind of calls.

    Attributes:
        name: `connect` (opens a connection and sends nothing), `round trip` (the smallest call, one
            at a time), `store`, `fetch` or `lookup`.
        num_calls: That were answered.
        num_chunks: That were stored, came back as they were stored, or were found.
        num_bytes: Their payloads.
        seconds: How long it took.
        calls_per_s: Calls a second.
        bytes_per_s: Payload bytes a second.
        latency_ms: Of one call; None without any.
        not_done: Chunks that were not stored, returned or found, by reason.
        failed_calls: Calls that failed, by what they said.
    """

    name: str
    num_calls: int
    num_chunks: int
    num_bytes: int
    seconds: float
    calls_per_s: float
    bytes_per_s: float
    latency_ms: Latency | None
    not_done: dict[str, int]
    failed_calls: dict[str, int]

    @property
    def is_of_the_way(self) -> bool:
        """Whether the phase measures the network and carries no chunks."""
        return self.name in (CONNECT, ROUND_TRIP)


class Report(msgspec.Struct, frozen=True):
    """The measurements.

    Attributes:
        load: The load.
        phases: The way there, then the work.
        num_removed: Chunks removed at the end.
        num_left: Chunks that are still there.
    """

    load: BenchLoad
    phases: list[Phase]
    num_removed: int
    num_left: int

    @property
    def is_well(self) -> bool:
        """Whether no call failed, chunks came back or were found, and none is left."""
        return not self.num_left and all(
            (phase.num_chunks or phase.is_of_the_way) and not phase.failed_calls
            for phase in self.phases
        )


def num_chunks_of(chunk_bytes: int, total_bytes: int) -> int:
    """Return how many chunks of that size add up to the total.

    Raises:
        UsageError: A size is beyond its bound.
    """
    num_chunks = max(1, total_bytes // chunk_bytes)
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise UsageError(
            f"a chunk of {chunk_bytes} bytes is beyond {MAX_CHUNK_BYTES}: give a smaller --size"
        )
    if total_bytes > MAX_TOTAL_BYTES or num_chunks > MAX_CHUNKS:
        raise UsageError(
            f"{num_chunks} chunks, {total_bytes} bytes: at most {MAX_CHUNKS} and {MAX_TOTAL_BYTES};"
            " give a smaller --total"
        )
    return num_chunks


def print_report(found: Report) -> None:
    """Print a line for each phase, then what went wrong."""
    load = found.load
    size = f" of {size_text(load.chunk_bytes)}" if load.chunk_bytes else ""
    what = (
        f"{load.num_chunks} chunks{size}, {load.batch} in a call, {load.concurrency} calls at once"
    )
    headings = ("", "calls", "calls/s", "chunks", "MiB/s", "p50 ms", "p90 ms", "p99 ms", "max ms")
    rows = [
        (
            phase.name,
            str(phase.num_calls),
            f"{phase.calls_per_s:,.0f}",
            UNKNOWN if phase.is_of_the_way else str(phase.num_chunks),
            f"{phase.bytes_per_s / (1 << 20):.0f}" if phase.num_bytes else UNKNOWN,
            *(
                (UNKNOWN,) * 4
                if phase.latency_ms is None
                else (f"{one:.2f}" for one in msgspec.structs.astuple(phase.latency_ms))
            ),
        )
        for phase in found.phases
    ]
    print_table(f"{load.target} {load.url}: {what}", Columns(headings), rows)
    for phase in found.phases:
        for reason, number in phase.not_done.items():
            print_text(f"{phase.name}: {number} chunks: {reason}")
        for reason, number in phase.failed_calls.items():
            print_text(f"{phase.name}: {number} calls failed: {reason}")
    print_text(
        "No call is faster than a round trip: the rest is the server and the transfer of the bytes."
    )
    left = f", {found.num_left} are LEFT" if found.num_left else ", none is left"
    print_text(f"{found.num_removed} chunks removed{left}")
