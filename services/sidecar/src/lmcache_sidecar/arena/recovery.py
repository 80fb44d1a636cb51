"""Chunks that an earlier start has left in the arena: checked, then served."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from lmcache_core.concurrency import Workers
from lmcache_core.errors import IdentityError, RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import MemoryObj
from lmcache_core.record import Chunk, RecordHeader, decode_head, verify_payload
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import StackListener
from lmcache_core.telemetry import Counters

from lmcache_sidecar import metrics
from lmcache_sidecar.arena.entries import Committed, with_padding

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""Two digests at once read memory about as fast as it can be read; engines want some of that
too.
"""
MAX_AHEAD = 2 * NUM_THREADS
"""Chunks that are being checked at once."""


@dataclass
class RecoveryProgress:
    """How far the recovery is.

    Attributes:
        found_chunks: Chunks in the arena when this process began.
        checked_chunks: Those of them whose bytes have been compared with their digest.
        recovered_chunks: Those that are served.
        damaged_chunks: Those whose bytes are not what was stored.
        dropped_chunks: Those that are whole, but too old, above a quota, or stored anew meanwhile.
    """

    found_chunks: int = 0
    checked_chunks: int = 0
    recovered_chunks: int = 0
    damaged_chunks: int = 0
    dropped_chunks: int = 0

    @property
    def is_over(self) -> bool:
        """Whether every chunk found is served or free."""
        return self.checked_chunks == self.found_chunks


class ArenaRecovery:
    """Checks chunks in threads, in the order in which they were kept, and hands what is whole to
    the hot tier.

    Args:
        found: What the journal says of each chunk, and its memory; the references pass to this
            object.
        hot: Where they go.
        listener: Told of each that is served.
        counters: Where they are counted, under the names of `lmcache_sidecar.metrics`.
    """

    def __init__(
        self,
        found: Sequence[tuple[Committed, MemoryObj]],
        hot: LocalCPUBackend,
        listener: StackListener,
        counters: Counters,
    ) -> None:
        self._waiting = deque(found)
        self._ahead: deque[tuple[Committed, MemoryObj, Future[RecordHeader | None]]] = deque()
        self._hot = hot
        self._listener = listener
        self._counters = counters
        self._workers = Workers("lmcache-recovery", NUM_THREADS)
        self.progress = RecoveryProgress(found_chunks=len(found))

    async def run(self) -> None:
        """Recover everything; once."""
        if not self._waiting:
            return
        self._workers.open()
        while self._waiting or self._ahead:
            while self._waiting and len(self._ahead) < MAX_AHEAD:
                entry, memory = self._waiting.popleft()
                self._ahead.append((entry, memory, self._workers.submit(_checked, entry, memory)))
            await asyncio.wait([asyncio.wrap_future(self._ahead[0][2])])
            entry, memory, check = self._ahead.popleft()
            self._settle(entry, memory, check.result())
        self._workers.close()
        progress = self.progress
        logger.info(
            "the arena of the earlier start is checked: of %d chunks %d are served again, %d were"
            " damaged, %d are not kept",
            progress.found_chunks,
            progress.recovered_chunks,
            progress.damaged_chunks,
            progress.dropped_chunks,
        )

    def close(self) -> None:
        """Give back what has not been dealt with. Idempotent."""
        self._workers.close()
        for memory in [memory for _, memory in self._waiting] + [
            memory for _, memory, _ in self._ahead
        ]:
            memory.ref_count_down()
        self._waiting.clear()
        self._ahead.clear()

    def _settle(self, entry: Committed, memory: MemoryObj, header: RecordHeader | None) -> None:
        progress = self.progress
        progress.checked_chunks += 1
        try:
            if header is None:
                progress.damaged_chunks += 1
                self._counters.add(metrics.UNRECOVERED_CHUNKS_TOTAL, 1, metrics.DAMAGED)
                return
            key = ChunkKey(entry.tenant, header.engine_key())
            chunk = Chunk(
                key, header, with_padding(entry.head), memory, self._hot.name, entry.stored_at
            )
            if self._keeps(chunk):
                progress.recovered_chunks += 1
                self._counters.add(metrics.RECOVERED_CHUNKS_TOTAL, 1)
                self._listener.stored(key, self._hot.name, chunk.num_bytes)
            else:
                progress.dropped_chunks += 1
                self._counters.add(metrics.UNRECOVERED_CHUNKS_TOTAL, 1, metrics.NOT_KEPT)
        finally:
            memory.ref_count_down()

    def _keeps(self, chunk: Chunk) -> bool:
        """Whether the hot tier holds it now; one that has been stored anew meanwhile stays as it
        is.
        """
        return not self._hot.contains_many([chunk.key])[0] and self._hot.put_many([chunk])[0]


def _checked(entry: Committed, memory: MemoryObj) -> RecordHeader | None:
    """The header of a chunk whose payload has its digest; None for any other."""
    try:
        header, payload_bytes = decode_head(with_padding(entry.head))
        if payload_bytes != entry.length:
            return None
        verify_payload(header, memory.byte_array)
        header.engine_key()
    except (RecordError, IdentityError):
        return None
    return header
