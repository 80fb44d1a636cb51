"""What `LMCacheTier` tells vLLM of the sidecar's chunks, for its own events of offloaded KV.

vLLM takes the events in its steps: what the sidecar loses while the engine has no request is told
with the next one. Wherever the sidecar has a chunk, in memory or on disk, is `STORAGE`, since `CPU`
is vLLM's own host memory.

Source: `vllm/v1/kv_offload/base.py` of vLLM 0.31 and later.
"""

from __future__ import annotations

import queue
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.kv_offload import base

from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.integrations.vllm.kv_events import AnnouncedChunk, Announcement, KVEvents
from lmcache_core.keys import Lane
from lmcache_core.sidecar import SidecarChunkStore


class TierEvents:
    """Follows the chunks that a tier names.

    Args:
        store: Of this object alone; opened and closed by it.
        lane: The keys of the tier's chunks.
    """

    def __init__(self, store: SidecarChunkStore, lane: Lane, guard: DegradingGuard) -> None:
        self._store = store
        self._places: dict[bytes, int] = {}
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._follower = KVEvents(store, [lane], _described, self._tell, guard)
        store.open(lambda salt: None)
        self._follower.open()

    def named(self, keys: Sequence[bytes], hashes: bytes) -> None:
        """Follow these chunks: vLLM's keys, and the packed hashes of their names; from any
        thread.
        """
        self._follower.named(keys, hashes, 0)

    def take(self) -> Iterator[Any]:
        """Yield vLLM's events since the last call."""
        while not self._events.empty():
            yield self._events.get()

    def forget(self) -> None:
        """Take back everything: it will not be found again."""
        self._follower.forget()

    def close(self) -> None:
        """Follow nothing more."""
        self._follower.close()
        self._store.close()

    def _tell(self, announcements: Sequence[Announcement]) -> None:
        for told in announcements:
            (key,) = told.chunk.block_hashes
            before = self._places.pop(key, 0)
            after = before | told.place if told.is_here else before & ~told.place
            if after:
                self._places[key] = after
            if bool(before) != bool(after):
                self._events.put(
                    base.OffloadingEvent(keys=[key], medium=base.Medium.STORAGE, removed=not after)
                )


def _described(keys: Sequence[bytes], first: int, last: int) -> Iterator[AnnouncedChunk]:
    for key in keys[first:last]:
        yield AnnouncedChunk((key,), None, array("I"), None)
