"""Observers of every call of a tier: log, counters and request trace."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.record import MissReason
from lmcache_core.telemetry import (
    MISSED_CHUNKS_TOTAL,
    TIER_BYTES_TOTAL,
    TIER_CALLS_TOTAL,
    TIER_CHUNKS_TOTAL,
    TIER_FAILURES_TOTAL,
    TIER_MICROSECONDS_TOTAL,
    Counters,
)
from lmcache_core.telemetry.request_context import step

logger = logging.getLogger(__name__)

HASH_CHARS: Final = 12
"""Digits of a chunk's hash that are logged, enough to correlate lines; the rest of its key is not
logged.
"""
_PREFIX, _SUFFIX = "lmcache_tier_", "_total"

Operation = Literal["contains", "get", "put", "remove", "clear"]


@dataclass(slots=True)
class TierCall:
    """One call of a tier.

    Attributes:
        keys: Keys of the chunks requested; empty for `clear`.
        num_chunks: Chunks found, read, stored or removed.
        num_bytes: Size of the records read or stored.
        misses: Chunks that a get did not return, by reason.
        seconds: Duration; known once the call has ended.
        error: Name of the exception that ended it, "" for none. A call that its caller cancelled,
            or that reached its deadline, ends with `CancelledError`.
    """

    tier: str
    operation: Operation
    keys: Sequence[ChunkKey]
    num_chunks: int = 0
    num_bytes: int = 0
    misses: Mapping[MissReason, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


class Observer:
    """Follows the calls of one tier on the event loop; must not block. The base class does
    nothing.
    """

    def during(self, call: TierCall) -> AbstractContextManager[None]:
        """Return a context manager that surrounds the tier's work for a call."""
        return nullcontext()

    def ended(self, call: TierCall) -> None:
        """Record a call, however it ended."""

    def stats(self) -> dict[str, int]:
        """Return figures for the tier's statistics."""
        return {}


class TraceObserver(Observer):
    """Creates a span for each call, named after the tier.

    Without an active trace this costs one look-up of a context variable. Background writes belong
    to no request and have no span.
    """

    @override
    def during(self, call: TierCall) -> AbstractContextManager[None]:
        return step(f"tier {call.tier} {call.operation}")


class LogObserver(Observer):
    """Logs one line per call at level debug."""

    def __init__(self, logger: logging.Logger = logger) -> None:
        self._logger = logger

    @override
    def ended(self, call: TierCall) -> None:
        if not self._logger.isEnabledFor(logging.DEBUG):
            return
        self._logger.debug(
            "tier called: tier=%s operation=%s first=%s chunks=%d of=%d bytes=%d ms=%.1f error=%s",
            call.tier,
            call.operation,
            call.keys[0].key.chunk_hash[:HASH_CHARS] if call.keys else "-",
            call.num_chunks,
            len(call.keys),
            call.num_bytes,
            call.seconds * 1e3,
            call.error or "-",
        )


class MetricsObserver(Observer):
    """Counts calls, chunks, bytes, failed calls and time by operation, and misses by reason.

    Args:
        counters: Counters of this tier alone, since a counter's one label is the operation or the
            reason.
    """

    def __init__(self, counters: Counters | None = None) -> None:
        self._counters = Counters() if counters is None else counters

    @override
    def ended(self, call: TierCall) -> None:
        add, operation = self._counters.add, call.operation
        add(TIER_CALLS_TOTAL, 1, operation)
        add(TIER_FAILURES_TOTAL, int(bool(call.error)), operation)
        add(TIER_MICROSECONDS_TOTAL, int(call.seconds * 1e6), operation)
        add(TIER_CHUNKS_TOTAL, call.num_chunks, operation)
        add(TIER_BYTES_TOTAL, call.num_bytes, operation)
        for reason, num_chunks in call.misses.items():
            add(MISSED_CHUNKS_TOTAL, num_chunks, reason)

    @override
    def stats(self) -> dict[str, int]:
        """Return `get_calls`, `get_bytes`, `put_microseconds`, `missed_evicted` and so on."""
        figures = {}
        for (name, label), value in self._counters.snapshot().items():
            if name == MISSED_CHUNKS_TOTAL:
                figure = f"missed_{label}"
            else:
                figure = f"{label}_{name.removeprefix(_PREFIX).removesuffix(_SUFFIX)}"
            if label and value:
                figures[figure] = value
        return figures
