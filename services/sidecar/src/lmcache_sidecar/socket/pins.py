"""Chunks that one client loads: kept in the arena until it gives them back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from itertools import takewhile

from lmcache_core.errors import ProtocolError, RecordError
from lmcache_core.record import Chunk, Miss, MissReason, Result, verify_payload
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.staging import ChunkBudget
from lmcache_core.wire.frames import MAX_ARENA_META_BYTES
from lmcache_core.wire.messages import Extent

logger = logging.getLogger(__name__)

MAX_PINS = 16384
MAX_PINNED_CHUNK_BYTES = 128
"""A chunk in an answer to LOAD, without its head; tier names are short."""


class ClientPins:
    """The pins of one client; each holds a reference.

    Args:
        hot: The tier in whose arena the chunks are.
        room: What this and other clients may pin together.
        ids: Where the names of pins come from.
    """

    def __init__(self, hot: LocalCPUBackend, room: ChunkBudget, ids: Iterator[int]) -> None:
        self._hot = hot
        self._room = room
        self._ids = ids
        self._chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena that are pinned; a chunk that is pinned twice counts twice."""
        return sum(chunk.memory.metadata.phy_size for chunk in self._chunks.values())

    def require_room(self, num_chunks: int) -> None:
        """Refuse a client that pins without end.

        Raises:
            ProtocolError: So many more would be more than `MAX_PINS`.
        """
        if len(self._chunks) + num_chunks > MAX_PINS:
            raise ProtocolError(f"more than {MAX_PINS} pins; release some first")

    def fitting(self, results: list[Result]) -> list[Result]:
        """Take room for the chunks in front of the first miss, each to be passed to `add`.

        Chunks that find no room are given back and count as misses.
        """
        chunks = list(takewhile(lambda result: isinstance(result, Chunk), results))
        num_fitting = self._room.take(
            [chunk for chunk in chunks if isinstance(chunk, Chunk)], unit=1
        )
        if num_fitting == len(chunks):
            return results
        return _cut(results, num_fitting)

    def add(self, chunk: Chunk) -> Extent:
        """Pin a chunk that `fitting` has let through; its reference passes to this object."""
        handle = next(self._ids)
        self._chunks[handle] = chunk
        return Extent(
            handle, chunk.memory.metadata.address, chunk.memory.get_size(), chunk.tier, chunk.head
        )

    def release(self, handles: Sequence[int]) -> None:
        """Give pins back; unknown ones are passed over."""
        for handle in handles:
            chunk = self._chunks.pop(handle, None)
            if chunk is not None:
                self._room.give([chunk])
                chunk.release()

    async def reject(self, handles: Sequence[int]) -> int:
        """Check chunks of which the client says that they are damaged; those that are leave the hot
        tier. The pins stay.

        Returns:
            How many were damaged.
        """
        num_damaged = 0
        for handle in handles:
            chunk = self._chunks.get(handle)
            if chunk is None:
                continue
            chunk.memory.ref_count_up()  # the client may be gone before its bytes are read
            try:
                if not await asyncio.to_thread(_is_intact, chunk):
                    num_damaged += 1
                    logger.error(
                        "chunk %s is damaged in the arena and is not served any more",
                        chunk.key.key.chunk_hash,
                    )
                    self._remove(chunk)
            finally:
                chunk.release()
        return num_damaged

    def close(self) -> None:
        """Give every pin back."""
        self.release(list(self._chunks))

    def _remove(self, chunk: Chunk) -> None:
        (held,) = self._hot.get_many([chunk.key])
        if held is not None:
            is_same = held.memory is chunk.memory  # else a good one has come in its place
            held.release()
            if is_same:
                self._hot.remove_many([chunk.key])


def fit_for_one_answer(results: list[Result]) -> list[Result]:
    """Heads of other writers may be large: chunks that one message cannot name are given back
    and count as misses.
    """
    room = MAX_ARENA_META_BYTES
    for i, result in enumerate(results):
        room -= len(result.head) + MAX_PINNED_CHUNK_BYTES if isinstance(result, Chunk) else 0
        if room < 0:
            return _cut(results, i)
    return results


def _cut(results: list[Result], num_kept: int) -> list[Result]:
    for surplus in results[num_kept:]:
        if isinstance(surplus, Chunk):
            surplus.release()
    return [*results[:num_kept], Miss(MissReason.NO_MEMORY)]


def _is_intact(chunk: Chunk) -> bool:
    try:
        verify_payload(chunk.header, chunk.memory.byte_array)
    except RecordError:
        return False
    return True
