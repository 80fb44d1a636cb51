"""Names of the library's counters: base units as suffix, hits and requests rather than ratios."""

from __future__ import annotations

LABEL_TIER = "tier"
LABEL_REASON = "reason"

REQUESTED_TOKENS_TOTAL = "lmcache_requested_tokens_total"
RETRIEVED_TOKENS_TOTAL = "lmcache_retrieved_tokens_total"
RETRIEVED_CHUNKS_TOTAL = "lmcache_retrieved_chunks_total"
RETRIEVED_BYTES_TOTAL = "lmcache_retrieved_bytes_total"
MISSED_CHUNKS_TOTAL = "lmcache_missed_chunks_total"
STORED_CHUNKS_TOTAL = "lmcache_stored_chunks_total"
STORED_BYTES_TOTAL = "lmcache_stored_bytes_total"
UNSTORED_CHUNKS_TOTAL = "lmcache_unstored_chunks_total"

TIER_CALLS_TOTAL = "lmcache_tier_calls_total"
TIER_CHUNKS_TOTAL = "lmcache_tier_chunks_total"
TIER_BYTES_TOTAL = "lmcache_tier_bytes_total"
TIER_FAILURES_TOTAL = "lmcache_tier_failures_total"
TIER_MICROSECONDS_TOTAL = "lmcache_tier_microseconds_total"
"""Time in calls of a tier. Counters are whole numbers, so this one is not in seconds."""

FAILED_CALLS_TOTAL = "lmcache_failed_calls_total"
