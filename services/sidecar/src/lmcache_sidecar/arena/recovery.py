"""Recovers chunks that an earlier start has left in the arena: they are checked, then served."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from lmcache_core.concurrency import Workers
from lmcache_core.errors import IdentityError, RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import MemoryObj
from lmcache_core.record import Chunk, decode_head, verify_payload
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import StackListener
from lmcache_core.telemetry import Counters

from lmcache_sidecar import metrics
from lmcache_sidecar.arena.entries import Committed, with_padding

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""Two threads digest nearly as fast as memory can be read; engines need some of that bandwidth."""
MAX_AHEAD = 2 * NUM_THREADS
"""Chunks checked at the same time."""


class ArenaRecovery:
    """Checks chunks in threads, in the order in which they were stored, and passes intact ones to
    the memory tier.

    Args:
        found: The journal's entry and the memory of each chunk; the references pass to this object.

    Attributes:
        found_chunks: Chunks in the arena when this process started.
        checked_chunks: Of these, chunks whose digest has been verified.
        recovered_chunks: Chunks that are served.
        damaged_chunks: Chunks whose content had changed.
        dropped_chunks: Intact chunks that were too old, over a quota, or replaced since.
    """

    def __init__(self, found: Sequence[tuple[Committed, MemoryObj]]) -> None:
        self._waiting = deque(found)
        self._ahead: deque[tuple[MemoryObj, Future[Chunk | None]]] = deque()
        self._workers = Workers("lmcache-recovery", NUM_THREADS)
        self.found_chunks = len(found)
        self.checked_chunks = self.recovered_chunks = 0
        self.damaged_chunks = self.dropped_chunks = 0

    @property
    def is_over(self) -> bool:
        """Return whether every chunk found has been served or freed."""
        return self.checked_chunks == self.found_chunks

    async def run(self, hot: LocalCPUBackend, listener: StackListener, counters: Counters) -> None:
        """Recover everything. Call it once.

        Args:
            listener: Notified of each chunk that is served.
            counters: Counters, under the names of `lmcache_sidecar.metrics`.
        """
        if not self._waiting:
            return
        self._workers.open()
        while self._waiting or self._ahead:
            while self._waiting and len(self._ahead) < MAX_AHEAD:
                entry, memory = self._waiting.popleft()
                check = self._workers.submit(_checked, entry, memory, hot.name)
                self._ahead.append((memory, check))
            await asyncio.wait([asyncio.wrap_future(self._ahead[0][1])])
            memory, check = self._ahead.popleft()
            self.checked_chunks += 1
            try:
                chunk = check.result()
                if chunk is None:
                    self.damaged_chunks += 1
                    counters.add(metrics.UNRECOVERED_CHUNKS_TOTAL, 1, metrics.DAMAGED)
                # A chunk that has been stored again since is not replaced.
                elif not hot.contains_many([chunk.key])[0] and hot.put_many([chunk])[0]:
                    self.recovered_chunks += 1
                    counters.add(metrics.RECOVERED_CHUNKS_TOTAL, 1)
                    listener.stored(chunk.key, hot.name, chunk.num_bytes)
                else:
                    self.dropped_chunks += 1
                    counters.add(metrics.UNRECOVERED_CHUNKS_TOTAL, 1, metrics.NOT_KEPT)
            finally:
                memory.ref_count_down()
        self._workers.close()
        logger.info(
            "recovered the arena of an earlier start: found=%d served=%d damaged=%d dropped=%d",
            self.found_chunks,
            self.recovered_chunks,
            self.damaged_chunks,
            self.dropped_chunks,
        )

    def close(self) -> None:
        """Release chunks that have not been processed. Idempotent."""
        self._workers.close()
        for memory in [memory for _, memory in self._waiting] + [each for each, _ in self._ahead]:
            memory.ref_count_down()
        self._waiting.clear()
        self._ahead.clear()


def _checked(entry: Committed, memory: MemoryObj, tier: str) -> Chunk | None:
    """Return the chunk if its payload matches its digest."""
    try:
        head = with_padding(entry.head)
        header, payload_bytes = decode_head(head)
        if payload_bytes != entry.length:
            return None
        verify_payload(header, memory.byte_array)
        key = ChunkKey.of(entry.tenant, header.engine_key())
    except (RecordError, IdentityError):
        return None
    return Chunk(key, header, head, memory, tier, entry.stored_at)
