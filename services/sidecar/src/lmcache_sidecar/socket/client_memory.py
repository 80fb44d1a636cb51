"""Arena memory held by one client: reservations that it fills, and chunks that it loads."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence

from lmcache_core.errors import ProtocolError, RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import MemoryObj
from lmcache_core.memory.free_list import extent_bytes
from lmcache_core.names import documented_tier
from lmcache_core.record import Chunk, Miss, MissReason, Result, release_all, verify_payload
from lmcache_core.wire.frames import MAX_ARENA_META_BYTES
from lmcache_core.wire.messages import Extent

from lmcache_sidecar.socket.context import SessionContext

logger = logging.getLogger(__name__)

MAX_RESERVATIONS = 16384
RESERVED_SHARE = 2
"""Reservations of one client may hold one part in this many of the arena."""
MAX_PINS = 16384
MAX_PINNED_CHUNK_BYTES = 128
"""Size of a chunk in an answer to LOAD, without its head; assumes short tier names."""


class ClientMemory:
    """The reservations and pins of one client, each with a reference and a unique handle.

    Attributes:
        reservations: Memory that the client fills, by handle.
        pins: Chunks that it loads, by handle.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._handles = itertools.count(1)
        self.reservations: dict[int, MemoryObj] = {}
        self.pins: dict[int, Chunk] = {}
        self.reserved_bytes = 0
        self._promised: dict[int, ChunkKey] = {}

    @property
    def pinned_bytes(self) -> int:
        """Return the arena memory held by pins; a chunk that is pinned twice counts twice."""
        return sum(chunk.memory.metadata.phy_size for chunk in self.pins.values())

    def reserve(self, sizes: Sequence[int]) -> list[Extent | None]:
        """Lend memory; None if there is no room."""
        lent = [self._reserve_one(size) for size in sizes]
        handles = [extent.id for extent in lent if extent is not None]
        journal = self._context.journal
        if (
            handles
            and journal is not None
            and not journal.reserved([self.reservations[handle] for handle in handles])
        ):
            self.release(handles)
            return [None] * len(lent)
        return lent

    def promise(self, handle: int, name: ChunkKey) -> None:
        """Let reads of a chunk wait for the client, which fills this reservation with it."""
        self._promised[handle] = name
        self._context.stack.expected.add(name)

    def settle(self, handles: Iterable[int]) -> None:
        """End these promises: each chunk is stored, or will not be."""
        names = [self._promised.pop(handle) for handle in handles if handle in self._promised]
        self._context.stack.expected.end(names)

    def take(self, handle: int) -> MemoryObj | None:
        """End a reservation; its reference passes to the caller. None for an unknown handle."""
        memory = self.reservations.pop(handle, None)
        if memory is not None:
            self.reserved_bytes -= memory.metadata.phy_size
            self._context.reserved_bytes -= memory.metadata.phy_size
        return memory

    def fitting(self, results: list[Result]) -> list[Result]:
        """Return the chunks before the first miss, with room reserved for them, and that miss. Pass
        each of the chunks to `pin`. Those without room, or that do not fit into one answer, count
        as misses. All others are released.
        """
        num_prefix = next((i for i, r in enumerate(results) if isinstance(r, Miss)), len(results))
        release_all(results[num_prefix:])
        results = results[: num_prefix + 1]
        meta_bytes = 0
        for i, result in enumerate(results):
            if isinstance(result, Chunk):  # other writers' heads may be large
                meta_bytes += len(result.head) + MAX_PINNED_CHUNK_BYTES
            if meta_bytes > MAX_ARENA_META_BYTES:
                results = _cut(results, i)
                break
        chunks = [result for result in results if isinstance(result, Chunk)]
        num_fitting = self._context.pinned.take(chunks, unit=1)
        return results if num_fitting == len(chunks) else _cut(results, num_fitting)

    def require_pins(self, num_chunks: int) -> None:
        """Refuse a client with too many pins.

        Raises:
            ProtocolError: `num_chunks` more would exceed `MAX_PINS`.
        """
        if len(self.pins) + num_chunks > MAX_PINS:
            raise ProtocolError(f"more than {MAX_PINS} pins; release some first")

    def pin(self, chunk: Chunk) -> Extent:
        """Pin a chunk that `fitting` has returned; its reference passes to this object."""
        handle = next(self._handles)
        self.pins[handle] = chunk
        memory = chunk.memory
        tier = documented_tier(chunk.tier)
        return Extent(handle, memory.metadata.address, memory.get_size(), tier, chunk.head)

    def release(self, handles: Sequence[int]) -> None:
        """Release reservations and pins; unknown handles are skipped."""
        self.settle(handles)
        for handle in handles:
            memory, chunk = self.take(handle), self.pins.pop(handle, None)
            if memory is not None:
                memory.ref_count_down()
            if chunk is not None:
                self._context.pinned.give([chunk])
                chunk.release()

    async def reject(self, handles: Sequence[int]) -> int:
        """Check pinned chunks that the client reports as damaged, and remove those that are from
        the memory tier. The pins stay.

        Returns:
            How many were damaged.
        """
        num_damaged = 0
        for handle in handles:
            chunk = self.pins.get(handle)
            if chunk is None:
                continue
            chunk.memory.ref_count_up()  # the client may be gone before its bytes are read
            try:
                await asyncio.to_thread(verify_payload, chunk.header, chunk.memory.byte_array)
            except RecordError:
                num_damaged += 1
                logger.error(
                    "damaged chunk in the arena, no longer serving it: chunk=%s",
                    chunk.key.key.chunk_hash,
                )
                self._stop_serving(chunk)
            finally:
                chunk.release()
        return num_damaged

    def abandon(self) -> None:
        """Withhold the reserved memory from all other use: the sidecar shuts down while the client
        may still be writing.
        """
        if self._context.journal is not None:
            memories = [self.take(handle) for handle in list(self.reservations)]
            self._context.journal.abandoned([memory for memory in memories if memory is not None])
        self.release(list(self.reservations))
        self.settle(list(self._promised))

    def close(self) -> None:
        """Release everything: the client is gone."""
        self.release([*self.reservations, *self.pins])

    def _reserve_one(self, size: int) -> Extent | None:
        context, num_bytes = self._context, extent_bytes(size)
        if (
            len(self.reservations) >= MAX_RESERVATIONS
            or self.reserved_bytes + num_bytes > context.arena.size // RESERVED_SHARE
            or context.reserved_bytes + num_bytes > context.max_reserved_bytes
        ):
            return None
        memory = context.stack.allocate(size)
        if memory is None:
            return None
        self.reserved_bytes += num_bytes
        context.reserved_bytes += num_bytes
        handle = next(self._handles)
        self.reservations[handle] = memory
        return Extent(handle, memory.metadata.address, size)

    def _stop_serving(self, chunk: Chunk) -> None:
        hot = self._context.stack.hot
        (held,) = hot.get_many([chunk.key])
        if held is not None:
            is_same = held.memory is chunk.memory  # else a good copy has replaced it
            held.release()
            if is_same:
                hot.remove_many([chunk.key])


def _cut(results: list[Result], num_kept: int) -> list[Result]:
    release_all(results[num_kept:])
    return [*results[:num_kept], Miss(MissReason.NO_MEMORY)]
