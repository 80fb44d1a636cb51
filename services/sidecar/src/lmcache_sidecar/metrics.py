"""Names of the sidecar's own counters, and what they mean: what the engines of the pod asked for and got."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from lmcache_core.telemetry import LABEL_REASON, LABEL_TIER
from lmcache_servicekit.collectors import Described

REQUESTED_CHUNKS_TOTAL: Final = "lmcache_sidecar_requested_chunks_total"
LOADED_CHUNKS_TOTAL: Final = "lmcache_sidecar_loaded_chunks_total"
LOADED_BYTES_TOTAL: Final = "lmcache_sidecar_loaded_bytes_total"
MISSED_CHUNKS_TOTAL: Final = "lmcache_sidecar_missed_chunks_total"
STORED_CHUNKS_TOTAL: Final = "lmcache_sidecar_stored_chunks_total"
STORED_BYTES_TOTAL: Final = "lmcache_sidecar_stored_bytes_total"
REFUSED_CHUNKS_TOTAL: Final = "lmcache_sidecar_refused_chunks_total"

DESCRIBED: Final = MappingProxyType(
    {
        REQUESTED_CHUNKS_TOTAL: Described("Chunks that engines wanted to load."),
        LOADED_CHUNKS_TOTAL: Described("Chunks handed to engines, by the tier that had them.", LABEL_TIER),
        LOADED_BYTES_TOTAL: Described("Bytes handed to engines, by the tier that had them.", LABEL_TIER),
        MISSED_CHUNKS_TOTAL: Described("Chunks wanted and not handed out, by the reason of the first that was missing.", LABEL_REASON),
        STORED_CHUNKS_TOTAL: Described("Chunks stored by engines."),
        STORED_BYTES_TOTAL: Described("Bytes stored by engines."),
        REFUSED_CHUNKS_TOTAL: Described("Reservations refused, for want of room or while draining."),
    }
)
