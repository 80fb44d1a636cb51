"""A piece of the sidecar's arena, lent to this process."""

from __future__ import annotations

from lmcache_core.memory.base import MemoryFormat, MemoryObjMetadata
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.sidecar.connection import SidecarConnection


class ArenaExtent(BytesBufferMemoryObj):
    """Bytes of the shared arena. The sidecar counts it as lent until the store gives `handle` back,
    or the connection's socket closes.

    Args:
        connection: Whose it is; handles of another connection mean nothing. It is held
            (`SidecarConnection.hold`) for this extent.
        handle: Reservation id (writable extents) or pin id (read-only extents).
        view: The bytes.
        metadata: What they hold.
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

    @classmethod
    def pinned(
        cls, connection: SidecarConnection, handle: int, offset: int, length: int
    ) -> ArenaExtent:
        """An extent to load from; its bytes are read-only."""
        metadata = MemoryObjMetadata((length,), None, offset, length, 1, MemoryFormat.BINARY)
        return cls(
            connection, handle, connection.arena.load_view[offset : offset + length], metadata
        )

    @classmethod
    def reserved(
        cls, connection: SidecarConnection, handle: int, offset: int, metadata: MemoryObjMetadata
    ) -> ArenaExtent:
        """An extent to fill for a store."""
        return cls(
            connection,
            handle,
            connection.arena.store_view[offset : offset + metadata.get_size()],
            metadata,
        )

    def end(self) -> None:
        """The bytes are not touched any more. Idempotent."""
        if self.is_lent:
            self.is_lent = False
            self.connection.let_go(1)
