"""What the library counts. No torch, no metrics client: a service exports these counters in its own way."""

from lmcache_core.telemetry.counters import Counters
from lmcache_core.telemetry.names import (
    LABEL_REASON,
    LABEL_TIER,
    MISSED_CHUNKS_TOTAL,
    REQUESTED_TOKENS_TOTAL,
    RETRIEVED_BYTES_TOTAL,
    RETRIEVED_CHUNKS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
)

__all__ = [
    "Counters",
    "LABEL_REASON",
    "LABEL_TIER",
    "MISSED_CHUNKS_TOTAL",
    "REQUESTED_TOKENS_TOTAL",
    "RETRIEVED_BYTES_TOTAL",
    "RETRIEVED_CHUNKS_TOTAL",
    "RETRIEVED_TOKENS_TOTAL",
    "STORED_BYTES_TOTAL",
    "STORED_CHUNKS_TOTAL",
    "UNSTORED_CHUNKS_TOTAL",
]
