"""Pieces of the sidecar's arena lent to this process, and validation of what the sidecar says about
them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmcache_core.errors import RecordError
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.names import tier_name
from lmcache_core.record import Chunk, decode_head
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.wire.messages import Extent

logger = logging.getLogger(__name__)


class ArenaExtent(BytesBufferMemoryObj):
    """Bytes of the shared arena. The sidecar counts them as lent until the store returns `handle`,
    or the connection's socket closes.

    Args:
        connection: Connection that lent it; handles of another connection are meaningless. It is
            held (`SidecarConnection.hold`) for this extent.
        handle: The id that the sidecar gave it.
    """

    def __init__(
        self,
        connection: SidecarConnection,
        handle: int,
        view: memoryview,
        metadata: MemoryObjMetadata,
    ) -> None:
        super().__init__(view, metadata)
        self.connection = connection
        self.handle = handle
        self.is_lent = True

    def end(self) -> None:
        """Record that the bytes are no longer accessed. Idempotent."""
        if self.is_lent:
            self.is_lent = False
            self.connection.release(1)


def lent(memories: Sequence[MemoryObj]) -> list[ArenaExtent]:
    """Return those of these memories that are still lent."""
    return [memory for memory in memories if isinstance(memory, ArenaExtent) and memory.is_lent]


def reserved_extents(
    connection: SidecarConnection,
    items: Sequence[Extent | str],
    shapes: Sequence[Sequence[int]],
    dtype: str,
) -> list[MemoryObj | NotLent] | None:
    """Return memory for tensors of these shapes, or the reason why there is none; None if the
    answer does not match the request.
    """
    sizes = [num_bytes(shape, dtype) for shape in shapes]
    if len(items) != len(sizes) or not all(
        isinstance(item, str) or (_is_inside(connection, item) and item.length == size)
        for item, size in zip(items, sizes, strict=True)
    ):
        return None
    view = connection.arena.store_view
    return [
        (NotLent.KNOWN if item == NotLent.KNOWN else NotLent.NO_ROOM)
        if isinstance(item, str)
        else ArenaExtent(
            connection,
            item.id,
            view[item.offset : item.offset + size],
            MemoryObjMetadata(tuple(shape), dtype, item.offset, size, 1, MemoryFormat.KV_BLOB),
        )
        for item, shape, size in zip(items, shapes, sizes, strict=True)
    ]


def loaded_chunk(
    connection: SidecarConnection, key: CacheEngineKey, extent: Extent
) -> Chunk | None:
    """Return the chunk of that name, not yet verified; None if the extent cannot hold it."""
    if not _is_inside(connection, extent):
        return None
    try:
        header, payload_bytes = decode_head(extent.head, key)
    except RecordError as exc:
        logger.warning("the sidecar served a damaged record head: reason=%s", exc.reason)
        return None
    if payload_bytes != extent.length:
        return None
    view = connection.mapping.bytes_to_load(extent.offset, extent.offset + extent.length)
    metadata = MemoryObjMetadata(
        (extent.length,), None, extent.offset, extent.length, 1, MemoryFormat.BINARY
    )
    memory = ArenaExtent(connection, extent.id, view, metadata)
    return Chunk(
        ChunkKey.of(DEFAULT_TENANT, key), header, extent.head, memory, tier_name(extent.tier)
    )


def _is_inside(connection: SidecarConnection, extent: Extent) -> bool:
    return (
        extent.offset >= 0
        and extent.length >= 0
        and extent.offset + extent.length <= connection.arena.size
    )
