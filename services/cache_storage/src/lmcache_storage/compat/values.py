"""Values of LMCache clients, stored as records of a separate kind."""

from __future__ import annotations

import asyncio
import struct
from typing import Final, cast

from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import (
    HEAD_ALIGN_BYTES,
    INLINE_DIGEST_BYTES,
    UNSEALED_DIGEST,
    Chunk,
    Extension,
    Miss,
    RecordHeader,
    TensorSpec,
    has_its_digest,
)
from lmcache_core.telemetry import Counters
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.served import AdaptsToClients, ServedStore

from lmcache_storage import metrics
from lmcache_storage.compat.dialect import NUM_ABOUT, About

ABOUT_EXTENSION: Final = 2
"""Id of the extension with the numbers by which a client described its value; ignorable, since only
its clients ask for it.
"""
MAX_HEAD_BYTES: Final = 2 * HEAD_ALIGN_BYTES
"""Alignment of records created here: their keys are short, and the rest of the head has a fixed
length.
"""
NAME_PREFIX: Final = "lmcache-"
TIER: Final = "compat"

_ABOUT: Final = struct.Struct(f"<{NUM_ABOUT}i")


class ForeignValues:
    """Values that only their clients can interpret, stored for one tenant under names that no KV
    has.

    They are marked lossy, because it is unknown whether they are.

    Args:
        store: The store; what clients do goes through its view for them, if it has any.
        dialect: Name of the dialect of the clients; other dialects number formats differently, and
            see none of these values.
        counters: Counters of values that cannot be served.
    """

    def __init__(self, store: ServedStore, tenant: str, dialect: str, counters: Counters) -> None:
        everything = Accepts(lossy=True)
        self._store = store.for_client(everything) if isinstance(store, AdaptsToClients) else store
        self._uncounted = store
        self._tenant = tenant
        self._kind = f"{NAME_PREFIX}{dialect}"
        self._counters = counters

    def allocate(self, num_bytes: int) -> MemoryObj | None:
        """Return memory for a value, owned by the caller; None if there is no room."""
        return self._store.allocate(num_bytes, self._tenant)

    async def contains(self, key: str) -> bool:
        """Return whether there is a value with that name."""
        [is_there] = await self._store.contains([self._chunk_key(key)])
        return is_there

    async def get(self, key: str) -> tuple[Chunk, About] | None:
        """Return the value, verified against its digest, and its client's description; None if
        there is none.

        The caller owns the chunk. A damaged one is removed.
        """
        [result] = await self._store.get([self._chunk_key(key)])
        if isinstance(result, Miss):
            return None
        try:
            about = self._about(result.header)
            if about is None:
                self._counters.add(metrics.UNSERVABLE_VALUES_TOTAL, label=metrics.ENCODING)
            elif not await has_its_digest(result.header, result.memory.byte_array):
                self._counters.add(metrics.UNSERVABLE_VALUES_TOTAL, label=metrics.CORRUPT)
                await self._store.remove([result.key])
            else:
                result.memory.ref_count_up()
                return result, about
        finally:
            result.release()
        return None

    async def put(self, key: str, about: About, memory: MemoryObj) -> bool:
        """Store a value (its memory is borrowed), replacing one with the same name and other
        content. False if there is no room.
        """
        chunk_key = self._chunk_key(key)
        chunk = Chunk.unsealed(
            chunk_key, self._header(chunk_key, about, memory.get_size()), memory, TIER
        )
        if memory.get_size() <= INLINE_DIGEST_BYTES:
            chunk.sealed()
        else:
            await asyncio.to_thread(chunk.sealed)
        [held] = await self._uncounted.get([chunk_key])
        if isinstance(held, Chunk):
            is_same = held.header == chunk.header
            held.release()
            if is_same:
                return True
            await self._store.remove([chunk_key])
        return await self._store.put(chunk)

    def _chunk_key(self, key: str) -> ChunkKey:
        return ChunkKey.of(self._tenant, CacheEngineKey(self._kind, "", 1, 0, key))

    def _header(self, key: ChunkKey, about: About, num_bytes: int) -> RecordHeader:
        spec = TensorSpec("", "uint8", (num_bytes,), 0, num_bytes)
        told = Extension(ABOUT_EXTENSION, False, _ABOUT.pack(*about))
        return RecordHeader(
            key.key.canonical(), self._kind, "", True, (spec,), UNSEALED_DIGEST, (told,)
        )

    def _about(self, header: RecordHeader) -> About | None:
        """Return the client's description; None for a record that was not created here, since
        others may put under this name, too.
        """
        for extension in header.extensions if header.serde == self._kind else ():
            if extension.id == ABOUT_EXTENSION and len(extension.data) == _ABOUT.size:
                return cast(About, _ABOUT.unpack(extension.data))
        return None


def is_foreign(key: ChunkKey) -> bool:
    """Return whether a key names a value of an LMCache client. Such a value is useful only on the
    server where that client looks for it.
    """
    return key.lane.fmt.startswith(NAME_PREFIX)
