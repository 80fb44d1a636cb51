"""Names of the library's counters: base units as suffix, hits and requests rather than ratios."""

from __future__ import annotations

LABEL_TIER = "tier"
LABEL_REASON = "reason"
LABEL_SERDE = "serde"
LABEL_PROFILE = "profile"

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
"""Time in calls of a tier. Counters are integers, so this one is not in seconds."""

IGNORED_WISHES_TOTAL = "lmcache_ignored_wishes_total"
FAILED_CALLS_TOTAL = "lmcache_failed_calls_total"

PINNED_BYTES = "lmcache_pinned_bytes"
"""A gauge (`Counters.watch`)."""

LOAD_SECONDS = "lmcache_load_seconds"
LOAD_BYTES = "lmcache_load_bytes"
STORE_SECONDS = "lmcache_store_seconds"
STORE_BYTES = "lmcache_store_bytes"
LOOKUP_SECONDS = "lmcache_lookup_seconds"
"""Measurements (`Counters.observe`)."""

CODEC_ENCODED_CHUNKS_TOTAL = "lmcache_codec_encoded_chunks_total"
CODEC_ENCODED_RAW_BYTES_TOTAL = "lmcache_codec_encoded_raw_bytes_total"
CODEC_ENCODED_BYTES_TOTAL = "lmcache_codec_encoded_bytes_total"
CODEC_ENCODE_MICROSECONDS_TOTAL = "lmcache_codec_encode_microseconds_total"
CODEC_UNENCODED_CHUNKS_TOTAL = "lmcache_codec_unencoded_chunks_total"
CODEC_DECODED_CHUNKS_TOTAL = "lmcache_codec_decoded_chunks_total"
CODEC_DECODED_RAW_BYTES_TOTAL = "lmcache_codec_decoded_raw_bytes_total"
CODEC_DECODED_BYTES_TOTAL = "lmcache_codec_decoded_bytes_total"
CODEC_DECODE_MICROSECONDS_TOTAL = "lmcache_codec_decode_microseconds_total"

CODEC_LAST_MAX_RELATIVE_ERROR = "lmcache_codec_last_max_relative_error"
CODEC_LAST_RMS_RELATIVE_ERROR = "lmcache_codec_last_rms_relative_error"
CODEC_WORST_MAX_RELATIVE_ERROR = "lmcache_codec_worst_max_relative_error"
CODEC_WORST_RMS_RELATIVE_ERROR = "lmcache_codec_worst_rms_relative_error"
"""Gauges; names without such a remark are counters. Errors are those measured by encoders, for each
profile.
"""
