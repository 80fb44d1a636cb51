"""Names and descriptions of the sidecar's own counters: what the engines of the pod requested and
got.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from lmcache_core.p2p.messages import MAX_COUNTED_LABELS
from lmcache_core.record import MissReason
from lmcache_core.telemetry import (
    CODEC_DECODE_MICROSECONDS_TOTAL,
    CODEC_DECODED_BYTES_TOTAL,
    CODEC_DECODED_CHUNKS_TOTAL,
    CODEC_DECODED_RAW_BYTES_TOTAL,
    CODEC_ENCODE_MICROSECONDS_TOTAL,
    CODEC_ENCODED_BYTES_TOTAL,
    CODEC_ENCODED_CHUNKS_TOTAL,
    CODEC_ENCODED_RAW_BYTES_TOTAL,
    CODEC_UNENCODED_CHUNKS_TOTAL,
    LABEL_REASON,
    LABEL_SERDE,
    LABEL_TIER,
)
from lmcache_node.collectors import Described

REQUESTED_CHUNKS_TOTAL: Final = "lmcache_sidecar_requested_chunks_total"
LOADED_CHUNKS_TOTAL: Final = "lmcache_sidecar_loaded_chunks_total"
LOADED_BYTES_TOTAL: Final = "lmcache_sidecar_loaded_bytes_total"
MISSED_CHUNKS_TOTAL: Final = "lmcache_sidecar_missed_chunks_total"
SAVED_TOKENS_TOTAL: Final = "lmcache_sidecar_saved_tokens_total"
SAVED_PREFILL_MICROSECONDS_TOTAL: Final = "lmcache_sidecar_saved_prefill_microseconds_total"
LABEL_MODEL: Final = "model"
MAX_MODELS: Final = MAX_COUNTED_LABELS
OTHER_MODEL: Final = "other"
STORED_CHUNKS_TOTAL: Final = "lmcache_sidecar_stored_chunks_total"
STORED_BYTES_TOTAL: Final = "lmcache_sidecar_stored_bytes_total"
REFUSED_CHUNKS_TOTAL: Final = "lmcache_sidecar_refused_chunks_total"
DRAINED_CHUNKS_TOTAL: Final = "lmcache_sidecar_drained_chunks_total"
HANDED_OVER_BYTES_TOTAL: Final = "lmcache_sidecar_handed_over_bytes_total"
RECEIVED_CHUNKS_TOTAL: Final = "lmcache_sidecar_received_chunks_total"
RECEIVED_BYTES_TOTAL: Final = "lmcache_sidecar_received_bytes_total"
COPIED_CHUNKS_TOTAL: Final = "lmcache_sidecar_copied_chunks_total"
COPIED_BYTES_TOTAL: Final = "lmcache_sidecar_copied_bytes_total"
LABEL_OUTCOME: Final = "outcome"
OUTCOMES: Final = ("handed_over", "already_elsewhere", "failed", "left")
CORRUPT_CHUNKS_TOTAL: Final = "lmcache_sidecar_corrupt_chunks_total"
REFUSED_CLIENTS_TOTAL: Final = "lmcache_sidecar_refused_clients_total"
TOO_MANY: Final = "too_many"
NO_ROOM: Final = "no_room"
TOO_SLOW: Final = "too_slow"

RECOVERED_CHUNKS_TOTAL: Final = "lmcache_sidecar_recovered_chunks_total"
UNRECOVERED_CHUNKS_TOTAL: Final = "lmcache_sidecar_unrecovered_chunks_total"
DAMAGED: Final = "damaged"
NOT_KEPT: Final = "not_kept"

DESCRIBED: Final = MappingProxyType(
    {
        REQUESTED_CHUNKS_TOTAL: Described("Chunks requested by engines."),
        LOADED_CHUNKS_TOTAL: Described(
            "Chunks loaded by engines, by the tier that had them.", LABEL_TIER
        ),
        LOADED_BYTES_TOTAL: Described(
            "Bytes loaded by engines, by the tier that had them.", LABEL_TIER
        ),
        MISSED_CHUNKS_TOTAL: Described(
            "Chunks requested and not loaded, by the reason of the first that was missing.",
            LABEL_REASON,
            tuple(MissReason),
        ),
        SAVED_TOKENS_TOTAL: Described(
            "Tokens of prompts that engines loaded instead of computing them.", LABEL_MODEL
        ),
        SAVED_PREFILL_MICROSECONDS_TOTAL: Described(
            "Prefill time of these tokens, by the speed that engines have configured or learned.",
            LABEL_MODEL,
        ),
        STORED_CHUNKS_TOTAL: Described("Chunks stored by engines."),
        STORED_BYTES_TOTAL: Described("Bytes stored by engines."),
        REFUSED_CHUNKS_TOTAL: Described(
            "Reservations refused, for lack of room or because of a drain."
        ),
        CORRUPT_CHUNKS_TOTAL: Described(
            "Chunks in shared memory that engines reported as damaged, and that were; they are no"
            " longer served."
        ),
        REFUSED_CLIENTS_TOTAL: Described(
            "Connections on the socket that were closed for lack of room or time.",
            LABEL_REASON,
            (TOO_MANY, NO_ROOM, TOO_SLOW),
        ),
        DRAINED_CHUNKS_TOTAL: Described(
            "Chunks processed by this sidecar's drains, by result.", LABEL_OUTCOME, OUTCOMES
        ),
        HANDED_OVER_BYTES_TOTAL: Described("Bytes handed over to storage or to peers."),
        RECEIVED_CHUNKS_TOTAL: Described(
            "Chunks received from terminating peers, and copies of hot ones."
        ),
        RECEIVED_BYTES_TOTAL: Described(
            "Bytes received from terminating peers, and copies of hot ones."
        ),
        COPIED_CHUNKS_TOTAL: Described("Hot chunks copied to peers."),
        COPIED_BYTES_TOTAL: Described("Bytes of hot chunks copied to peers."),
        RECOVERED_CHUNKS_TOTAL: Described(
            "Chunks of an earlier start in shared memory that are served again."
        ),
        UNRECOVERED_CHUNKS_TOTAL: Described(
            "Chunks of an earlier start in shared memory that are not served again.",
            LABEL_REASON,
            (DAMAGED, NOT_KEPT),
        ),
        CODEC_ENCODED_CHUNKS_TOTAL: Described("Chunks encoded, for a tier or a peer.", LABEL_SERDE),
        CODEC_ENCODED_RAW_BYTES_TOTAL: Described(
            "Bytes of these chunks before encoding.", LABEL_SERDE
        ),
        CODEC_ENCODED_BYTES_TOTAL: Described("Bytes of these chunks after encoding.", LABEL_SERDE),
        CODEC_ENCODE_MICROSECONDS_TOTAL: Described(
            "Time spent encoding, summed over threads.", LABEL_SERDE
        ),
        CODEC_UNENCODED_CHUNKS_TOTAL: Described(
            "Chunks that encoding would not have made smaller; they stay raw.", LABEL_SERDE
        ),
        CODEC_DECODED_CHUNKS_TOTAL: Described("Chunks decoded.", LABEL_SERDE),
        CODEC_DECODED_RAW_BYTES_TOTAL: Described(
            "Bytes of these chunks after decoding.", LABEL_SERDE
        ),
        CODEC_DECODED_BYTES_TOTAL: Described("Bytes of these chunks before decoding.", LABEL_SERDE),
        CODEC_DECODE_MICROSECONDS_TOTAL: Described(
            "Time spent decoding, summed over threads.", LABEL_SERDE
        ),
    }
)
