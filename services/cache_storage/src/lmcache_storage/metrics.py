"""Names and descriptions of the storage's own counters."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from lmcache_core.record import MissReason
from lmcache_core.telemetry import LABEL_REASON, LABEL_TIER
from lmcache_node.collectors import Described

SERVED_CHUNKS_TOTAL: Final = "lmcache_storage_served_chunks_total"
SERVED_BYTES_TOTAL: Final = "lmcache_storage_served_bytes_total"
MISSED_CHUNKS_TOTAL: Final = "lmcache_storage_missed_chunks_total"
STORED_CHUNKS_TOTAL: Final = "lmcache_storage_stored_chunks_total"
STORED_BYTES_TOTAL: Final = "lmcache_storage_stored_bytes_total"
REFUSED_CHUNKS_TOTAL: Final = "lmcache_storage_refused_chunks_total"
REMOVED_CHUNKS_TOTAL: Final = "lmcache_storage_removed_chunks_total"
COMPAT_REQUESTS_TOTAL: Final = "lmcache_storage_compat_requests_total"
COMPAT_CLOSED_TOTAL: Final = "lmcache_storage_compat_closed_total"
UNSERVABLE_VALUES_TOTAL: Final = "lmcache_storage_compat_unservable_values_total"
MOVED_CHUNKS_TOTAL: Final = "lmcache_storage_moved_chunks_total"
HANDED_OVER_BYTES_TOTAL: Final = "lmcache_storage_handed_over_bytes_total"
RECEIVED_CHUNKS_TOTAL: Final = "lmcache_storage_received_chunks_total"
RECEIVED_BYTES_TOTAL: Final = "lmcache_storage_received_bytes_total"
LABEL_COMMAND: Final = "command"
LABEL_OUTCOME: Final = "outcome"
OUTCOMES: Final = ("handed_over", "already_elsewhere", "failed")
CORRUPT: Final = "corrupt"
ENCODING: Final = "encoding"
COMPAT_COMMANDS: Final = ("put", "get", "exist", "health")
COMPAT_CLOSE_REASONS: Final = ("too_many", "command", "key", "length", "short", "slow", "idle")

DESCRIBED: Final = MappingProxyType(
    {
        SERVED_CHUNKS_TOTAL: Described("Chunks sent, by the tier that had them.", LABEL_TIER),
        SERVED_BYTES_TOTAL: Described(
            "Bytes of records sent, by the tier that had them.", LABEL_TIER
        ),
        MISSED_CHUNKS_TOTAL: Described(
            "Chunks requested and not sent, by the reason.", LABEL_REASON, tuple(MissReason)
        ),
        STORED_CHUNKS_TOTAL: Described("Chunks stored."),
        STORED_BYTES_TOTAL: Described("Bytes of records stored."),
        REFUSED_CHUNKS_TOTAL: Described("Chunks refused, for lack of room or because of a drain."),
        REMOVED_CHUNKS_TOTAL: Described("Chunks removed on request."),
        MOVED_CHUNKS_TOTAL: Described(
            "Chunks to move to other servers, at drains and after servers have joined or left.",
            LABEL_OUTCOME,
            OUTCOMES,
        ),
        HANDED_OVER_BYTES_TOTAL: Described("Bytes of records sent to other servers."),
        RECEIVED_CHUNKS_TOTAL: Described("Chunks received from other servers."),
        RECEIVED_BYTES_TOTAL: Described("Bytes of records received from other servers."),
        COMPAT_REQUESTS_TOTAL: Described(
            "Requests of LMCache clients.", LABEL_COMMAND, COMPAT_COMMANDS
        ),
        COMPAT_CLOSED_TOTAL: Described(
            "Connections of LMCache clients that were closed, by the reason.",
            LABEL_REASON,
            COMPAT_CLOSE_REASONS,
        ),
        UNSERVABLE_VALUES_TOTAL: Described(
            "Values requested by LMCache clients that exist but could not be served.",
            LABEL_REASON,
            (CORRUPT, ENCODING),
        ),
    }
)
