"""Background writes to a slower tier: bounded in bytes, dropped and counted beyond the bound,
finished or abandoned at close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.base import IsUnwanted, StorageBackend
from lmcache_core.storage.sealing import seal_all

logger = logging.getLogger(__name__)

MAX_WAITING_NAMES = 1 << 16
"""Chunks that may wait by name, beyond the bound in bytes; a prompt of a million tokens has 4,096.
"""
BATCH_CHUNKS = 16
BATCH_BYTES = 128 << 20
"""Bounds on one call of the tier, which has a deadline."""
MAX_REFILL = 64
"""Names looked up in one step on the event loop."""
BYPASSED_SHARE = 8
"""While the tier is bypassed, waiting chunks may hold one part in this many of the bound."""
RESTART_S = 1.0


FindChunks = Callable[[Sequence[ChunkKey]], Sequence[Chunk | None]]


class WriteBehind:
    """Writes chunks to one tier later, in order.

    A store that is larger than the bound is written in several rounds: the rest waits by name, and
    is fetched from memory when there is room again.

    Args:
        max_pending_bytes: Bound on waiting bytes, whose arena memory cannot be evicted.
        on_written: Called on the loop with every chunk that the tier has stored.
        find: Returns chunks that are still in memory, with a reference each; without it, only what
            fits within the bound is written.

    Attributes:
        later: Chunks that wait by name until there is room for their bytes.
        pending_bytes: Bytes of the chunks in memory that wait or are being written.
        num_dropped: Chunks dropped for lack of room, memory or time.
        num_failed: Chunks that the tier did not store.
    """

    def __init__(
        self,
        backend: StorageBackend,
        max_pending_bytes: int,
        on_written: Callable[[Chunk, str], None],
        find: FindChunks | None = None,
    ) -> None:
        self._backend = backend
        self._find = find
        self.later: deque[ChunkKey] = deque()
        self._max_pending_bytes = max_pending_bytes
        self._on_written = on_written
        self._pending: deque[Chunk] = deque()
        self._writing: list[Chunk] = []
        self._unwanted: set[ChunkKey] = set()
        self._removals: dict[object, IsUnwanted] = {}
        self._written = asyncio.Event()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = TaskSupervisor(f"write-behind/{backend.name}")
        self._is_closed = False
        self.pending_bytes = 0
        self.num_dropped = 0
        self.num_failed = 0

    @property
    def is_writing(self) -> bool:
        """Return whether anything waits, by name or with its bytes, or is being written."""
        return bool(self._pending or self._writing or self.later)

    def open(self) -> None:
        """Start the writer."""
        self._tasks.repeat("writer", self._write_forever, RESTART_S)

    def offer(self, chunks: Sequence[Chunk]) -> None:
        """Queue chunks for writing, in order: as many from the first as there is room for, the
        others in later rounds.

        Takes a reference on each chunk that waits with its bytes. A chunk is dropped and counted if
        there is no room for its bytes or its name, or if the writer is closed.
        """
        if not self._backend.keeps_tails:
            chunks = [chunk for chunk in chunks if not chunk.key.lane.is_tail]
        num_taken = 0
        if not self._is_closed and not self.later:
            while num_taken < len(chunks) and self._has_room(chunks[num_taken]):
                chunks[num_taken].memory.ref_count_up()
                self._enqueue(chunks[num_taken])
                num_taken += 1
        num_named = 0
        if not self._is_closed and self._find is not None:
            num_named = min(len(chunks) - num_taken, MAX_WAITING_NAMES - len(self.later))
            self.later.extend(chunk.key for chunk in chunks[num_taken : num_taken + num_named])
        self.num_dropped += len(chunks) - num_taken - num_named
        if num_taken or num_named:
            self._idle.clear()
            self._wake.set()

    @contextmanager
    def holding_back(self, is_unwanted: IsUnwanted) -> Iterator[None]:
        """Hold back writes of these chunks while they are being removed from the tier.

        The remover must wait for `arrived`, then call `forget`, and only then remove them from the
        tier; otherwise a pending write brings them back.
        """
        removal = object()
        self._removals[removal] = is_unwanted
        try:
            yield
        finally:
            del self._removals[removal]
            self._wake.set()

    def forget(self, is_unwanted: IsUnwanted) -> None:
        """Drop those of these chunks that wait."""
        pending, self._pending = self._pending, deque()
        for chunk in pending:
            if is_unwanted(chunk.key):
                self._settle(chunk)
            else:
                self._pending.append(chunk)
        self.later = deque(key for key in self.later if not is_unwanted(key))

    async def arrived(self, is_unwanted: IsUnwanted, timeout_s: float) -> None:
        """Wait until none of these chunks is being written, at most `timeout_s` seconds; one that
        takes longer is removed when it arrives.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while any(is_unwanted(chunk.key) for chunk in self._writing):
                    await self._written.wait()
        except TimeoutError:
            self._unwanted.update(chunk.key for chunk in self._writing if is_unwanted(chunk.key))

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False if that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, drain_s: float) -> None:
        """Write pending chunks for up to `drain_s` seconds, abandon the rest, and stop the
        writer.
        """
        if drain_s > 0:
            await self.drain(drain_s)
        self._is_closed = True
        await self._tasks.close()
        self.num_dropped += len(self._pending) + len(self.later)
        self.later.clear()
        while self._pending:
            self._settle(self._pending.popleft())

    async def _write_forever(self) -> None:
        while True:
            self._refill()
            self._writing = self._next_batch()
            if not self._writing:
                if not self._pending and self.later:  # much of a long store has been evicted
                    await asyncio.sleep(0)
                    continue
                if not self._pending:
                    self._idle.set()
                await self._wake.wait()
                self._wake.clear()
                continue
            self._written.clear()
            try:
                await self._write(self._writing)
            finally:
                batch, self._writing = self._writing, []
                self._unwanted.clear()
                self._written.set()
                for chunk in batch:
                    self._settle(chunk)
            # A tier that is bypassed, or has the chunks it is asked for, need not suspend.
            await asyncio.sleep(0)

    def _next_batch(self) -> list[Chunk]:
        """Dequeue the next chunks to write; those being removed from the tier stay queued."""
        batch: list[Chunk] = []
        num_bytes = 0
        for chunk in self._pending:
            if any(is_unwanted(chunk.key) for is_unwanted in self._removals.values()):
                continue
            num_bytes += chunk.num_bytes
            if len(batch) == BATCH_CHUNKS or (batch and num_bytes > BATCH_BYTES):
                break
            batch.append(chunk)
        for chunk in batch:
            self._pending.remove(chunk)
        return batch

    async def _write(self, batch: list[Chunk]) -> None:
        kept = [False] * len(batch)
        known = [False] * len(batch)
        fresh = batch
        with contextlib.suppress(UnavailableError):
            if self._backend.is_asked_first:
                known = await self._backend.batched_contains([chunk.key for chunk in batch])
                fresh = [chunk for chunk, has in zip(batch, known, strict=True) if not has]
                await seal_all(fresh)
            answers = iter(await self._backend.batched_put(fresh) if fresh else [])
            kept = [is_known or next(answers) for is_known in known]
            if self._unwanted:
                await self._backend.batched_remove(list(self._unwanted))
        for chunk, is_kept in zip(batch, kept, strict=True):
            if chunk.key in self._unwanted:
                continue
            if is_kept:
                self._on_written(chunk, self._backend.name)
            else:
                self.num_failed += 1

    def _has_room(self, chunk: Chunk) -> bool:
        bound = self._max_pending_bytes
        if self._backend.is_bypassed:
            bound = min(bound, max(bound // BYPASSED_SHARE, chunk.num_bytes))  # enough for a probe
        return self.pending_bytes + chunk.num_bytes <= bound

    def _enqueue(self, chunk: Chunk) -> None:
        self.pending_bytes += chunk.num_bytes
        self._pending.append(chunk)

    def _refill(self) -> None:
        """Fetch from memory chunks that wait by name, as far as there is room; those evicted in the
        meantime are dropped and counted.
        """
        for _ in range(min(len(self.later), MAX_REFILL)):
            assert self._find is not None, "only a writer with `find` queues names"
            (chunk,) = self._find([self.later[0]])
            if chunk is None:
                self.num_dropped += 1
            elif self._has_room(chunk):
                self._enqueue(chunk)
            else:
                chunk.release()
                if self._pending:
                    return
                self.num_dropped += 1  # larger than the bound: it will never fit
            self.later.popleft()

    def _settle(self, chunk: Chunk) -> None:
        self.pending_bytes -= chunk.num_bytes
        chunk.release()
