"""The door through which peers that end hand over their chunks."""

from __future__ import annotations

from lmcache_core.record import RAW_SERDE, Chunk
from lmcache_core.storage.client_view import WrappedStore
from lmcache_core.telemetry import Counters
from lmcache_core.wire import ServedStore

from lmcache_sidecar import metrics


class HandoverDoor(WrappedStore):
    """Lets in what this sidecar's own engines could have stored or loaded: raw chunks of its
    tenant, with loss only where that is taken.

    Args:
        store: What is wrapped; it says when nothing at all is taken.
        tenant: Of this pod.
        accepts_lossy: Whether chunks that have lost something are taken.
        counters: What came in, under the names of `lmcache_sidecar.metrics`.
    """

    def __init__(
        self, store: ServedStore, tenant: str, accepts_lossy: bool, counters: Counters
    ) -> None:
        super().__init__(store)
        self._tenant = tenant
        self._accepts_lossy = accepts_lossy
        self._counters = counters

    async def put(self, chunk: Chunk) -> bool:
        """See `ServedStore.put`."""
        is_ours = chunk.key.tenant == self._tenant and chunk.described.serde == RAW_SERDE
        is_kept = is_ours and (self._accepts_lossy or not chunk.lossy) and await super().put(chunk)
        self._counters.add(metrics.RECEIVED_CHUNKS_TOTAL, is_kept)
        self._counters.add(metrics.RECEIVED_BYTES_TOTAL, chunk.num_bytes * is_kept)
        return is_kept
