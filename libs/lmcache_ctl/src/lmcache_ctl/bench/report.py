"""What a bench does, and what comes of it."""

from __future__ import annotations

from typing import Final

import msgspec

from lmcache_ctl.errors import UsageError

SCHEMES: Final = ("lm://", "lm+tls://", "http://", "https://")
MAX_CHUNK_BYTES: Final = 256 << 20
MAX_TOTAL_BYTES: Final = 64 << 30
MAX_CHUNKS: Final = 65_536


class Load(msgspec.Struct, frozen=True):
    """What is to be done: where, for how long (seconds), with which sizes (bytes)."""

    url: str
    seconds: float
    chunk_bytes: int
    total_bytes: int
    concurrency: int
    batch: int

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return max(1, self.total_bytes // self.chunk_bytes)


class Latency(msgspec.Struct, frozen=True):
    """Of calls, milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Phase(msgspec.Struct, frozen=True):
    """One kind of calls.

    Attributes:
        name: `store` or `fetch`.
        num_calls: That were answered.
        num_chunks: That were stored, or came back as they were stored.
        num_bytes: Their payloads.
        seconds: How long it took.
        bytes_per_s: Payload bytes a second.
        latency_ms: Of one call; None without any.
        not_done: Chunks that were not stored or did not come back, by the reason.
        failed_calls: Calls that failed, by what they said.
    """

    name: str
    num_calls: int
    num_chunks: int
    num_bytes: int
    seconds: float
    bytes_per_s: float
    latency_ms: Latency | None
    not_done: dict[str, int]
    failed_calls: dict[str, int]


class Report(msgspec.Struct, frozen=True):
    """What was measured.

    Attributes:
        load: What was done.
        phases: Storing, then fetching.
        num_removed: Chunks removed at the end.
        num_left: Chunks that are still there.
    """

    load: Load
    phases: list[Phase]
    num_removed: int
    num_left: int

    @property
    def is_well(self) -> bool:
        """Whether no call failed, chunks came back, and none is left."""
        return not self.num_left and all(phase.num_chunks and not phase.failed_calls for phase in self.phases)


def checked_load(load: Load) -> Load:
    """The same.

    Raises:
        UsageError: The URL is none of a cache_storage, or a size is beyond its bound.
    """
    if not load.url.startswith(SCHEMES):
        raise UsageError(f"{load.url!r} is no cache_storage: its URL begins with one of {', '.join(SCHEMES)}")
    if load.chunk_bytes > MAX_CHUNK_BYTES:
        raise UsageError(f"a chunk of {load.chunk_bytes} bytes is beyond {MAX_CHUNK_BYTES}: give a smaller --size")
    if load.total_bytes > MAX_TOTAL_BYTES or load.num_chunks > MAX_CHUNKS:
        raise UsageError(
            f"{load.num_chunks} chunks, {load.total_bytes} bytes: at most {MAX_CHUNKS} and {MAX_TOTAL_BYTES}; give a smaller --total"
        )
    return load
