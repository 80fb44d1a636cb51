"""The engine's chunk store in sidecar mode: no tier of its own, everything through the pod's sidecar.

The sidecar may be absent, killed or restarted at any moment: every call then answers as an empty cache would, at the price of at most
one connection attempt per back-off interval, and goes on by itself when the sidecar is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lmcache_core.errors import LMCacheError, ProtocolError, RecordError, UnavailableError
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import Chunk, HotVerifier, MissReason, decode_head
from lmcache_core.sidecar import messages as m
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.extent import ArenaExtent
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, Counters

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
CALL_MARGIN_S = 0.5

A = TypeVar("A", bound=m.Message)


class SidecarChunkStore:
    """See `lmcache_core.engine.ChunkStore`.

    Args:
        path: The sidecar's socket.
        hello: What to say at each connection.
        timeout_s: Longest wait for chunks from the sidecar's tiers.
        counters: Where misses are counted.
    """

    def __init__(self, path: Path, hello: m.Hello, timeout_s: float, counters: Counters) -> None:
        self._path = path
        self._hello = hello
        self._timeout_s = timeout_s
        self._counters = counters
        self._connection: SidecarConnection | None = None
        self._on_salt: Callable[[str], None] = lambda salt: None
        self._next_try = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._verifier = HotVerifier("always")
        self._closed = False
        self._connecting = threading.Lock()

    def open(self, on_salt: Callable[[str], None]) -> None:
        """Try to connect; no sidecar is not an error. `on_salt` is called with the sidecar's salt at each connection."""
        self._on_salt = on_salt
        self._connected()

    def close(self) -> None:
        """Close the connection; reservations and pins go back to the sidecar."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        """See `ChunkStore.lookup`."""
        num_prefix = 0
        for batch in m.split_batches([key.canonical() for key in keys]):
            answer = self._call(m.Lookup(batch, tuple(search_range or ())), m.LookupOk, self._timeout_s)
            if answer is None:
                break
            num_prefix += min(answer.num_prefix, len(batch))
            if answer.num_prefix < len(batch):
                break
        return num_prefix

    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        """See `ChunkStore.prefetch`."""
        for batch in m.split_batches([key.canonical() for key in keys]):
            self._call(m.Prefetch(batch), m.PrefetchOk)

    def reserve(self, shapes: Sequence[Sequence[int]], dtype: str) -> list[MemoryObj | None]:
        """See `ChunkStore.reserve`."""
        sizes = [num_bytes(shape, dtype) for shape in shapes]
        extents: list[MemoryObj | None] = []
        for at in range(0, len(sizes), m.MAX_BATCH):
            connection = self._connected()
            answer = self._call(m.Reserve(tuple(sizes[at : at + m.MAX_BATCH])), m.ReserveOk)
            if answer is None or connection is None:
                break
            for shape, given in zip(shapes[at:], answer.reservations, strict=False):
                extents.append(None if given is None else self._reserved(connection, given, shape, dtype))
        return extents + [None] * (len(sizes) - len(extents))

    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `ChunkStore.put`."""
        stored: list[bool] = []
        connection = self._connection
        for at in range(0, len(chunks), m.MAX_BATCH):
            batch = chunks[at : at + m.MAX_BATCH]
            items = tuple((_handle(chunk, connection), chunk.head) for chunk in batch)
            answer = self._call(m.Commit(items), m.CommitOk)
            stored.extend([False] * len(batch) if answer is None else answer.stored)
        return stored

    def get(self, keys: Sequence[CacheEngineKey]) -> list[Chunk]:
        """See `ChunkStore.get`."""
        chunks: list[Chunk] = []
        for at in range(0, len(keys), m.MAX_BATCH):
            batch = keys[at : at + m.MAX_BATCH]
            connection = self._connected()
            pin = m.Pin(tuple(key.canonical() for key in batch), int(self._timeout_s * 1000))
            answer = self._call(pin, m.PinOk, self._timeout_s + CALL_MARGIN_S)
            if answer is None or connection is None:
                self._counters.add(MISSED_CHUNKS_TOTAL, len(keys) - len(chunks), MissReason.UNAVAILABLE)
                break
            good, reason = self._take(connection, batch, answer)
            chunks.extend(good)
            if len(good) < len(batch):
                self._counters.add(MISSED_CHUNKS_TOTAL, len(keys) - len(chunks), reason)
                break
        return chunks

    def release(self, chunks: Sequence[Chunk]) -> None:
        """See `ChunkStore.release`."""
        self._give_back([chunk.memory for chunk in chunks], m.Release, m.ReleaseOk)

    def abort(self, memories: Sequence[MemoryObj]) -> None:
        """See `ChunkStore.abort`."""
        self._give_back(memories, m.Abort, m.AbortOk)

    def stats(self) -> dict[str, dict[str, int]]:
        """Figures of the sidecar's tiers; empty when it is away."""
        answer = self._call(m.Stats(), m.StatsOk)
        return {} if answer is None else answer.stats

    def _take(self, connection: SidecarConnection, keys: Sequence[CacheEngineKey], answer: m.PinOk) -> tuple[list[Chunk], str]:
        good: list[Chunk] = []
        reason = answer.miss_reason or MissReason.NEVER_STORED
        for key, pinned in zip(keys, answer.chunks, strict=False):
            chunk = self._checked(connection, key, pinned)
            if chunk is None:
                reason = MissReason.CORRUPT
                break
            good.append(chunk)
        rejected = [pinned.pin for pinned in answer.chunks[len(good) :]]
        if rejected:
            self._call(m.Release(tuple(rejected)), m.ReleaseOk)
        return good, reason

    def _checked(self, connection: SidecarConnection, key: CacheEngineKey, pinned: m.PinnedChunk) -> Chunk | None:
        if pinned.offset < 0 or pinned.length < 0 or pinned.offset + pinned.length > connection.arena.size:
            return None
        try:
            header, payload_bytes = decode_head(pinned.head, key)
        except RecordError as exc:
            logger.warning("the sidecar served a damaged record head: %s", exc.reason)
            return None
        if payload_bytes != pinned.length:
            return None
        memory = ArenaExtent.pinned(connection, pinned.pin, pinned.offset, pinned.length)
        chunk = Chunk(ChunkKey(DEFAULT_TENANT, key), header, pinned.head, memory, pinned.tier)
        return chunk if self._verifier.is_intact(chunk) else None

    def _reserved(self, connection: SidecarConnection, given: tuple[int, int], shape: Sequence[int], dtype: str) -> ArenaExtent | None:
        handle, offset = given
        metadata = MemoryObjMetadata(tuple(shape), dtype, offset, num_bytes(shape, dtype), 1, MemoryFormat.KV_BLOB)
        if offset < 0 or offset + metadata.get_size() > connection.arena.size:
            return None
        return ArenaExtent.reserved(connection, handle, offset, metadata)

    def _give_back(self, memories: Sequence[MemoryObj], request: type[m.Release] | type[m.Abort], expected: type[A]) -> None:
        connection = self._connection
        handles = [memory.handle for memory in memories if isinstance(memory, ArenaExtent) and memory.connection is connection]
        for at in range(0, len(handles), m.MAX_BATCH):
            self._call(request(tuple(handles[at : at + m.MAX_BATCH])), expected)

    def _call(self, request: m.Message, expected: type[A], timeout_s: float | None = None) -> A | None:
        connection = self._connected()
        if connection is None:
            return None
        try:
            return connection.call(request, expected, timeout_s)
        except (UnavailableError, ProtocolError) as exc:
            if not connection.is_open:
                self._lost(exc)
            else:
                logger.warning("%s", exc)
            return None

    def _connected(self) -> SidecarConnection | None:
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        with self._connecting:
            if self._connection is not None and self._connection.is_open:
                return self._connection
            return self._connect()

    def _connect(self) -> SidecarConnection | None:
        if self._closed or time.monotonic() < self._next_try:
            return None
        connection = SidecarConnection(self._path, self._hello, self._timeout_s)
        try:
            connection.open()
        except (UnavailableError, ProtocolError) as exc:
            self._lost(exc)
            return None
        self._backoff_s = FIRST_BACKOFF_S
        self._verifier = HotVerifier(connection.welcome.verify_hot)
        self._on_salt(connection.welcome.salt)
        self._connection = connection
        logger.info("connected to sidecar %s, arena of %d bytes", connection.welcome.server, connection.welcome.arena_bytes)
        return connection

    def _lost(self, cause: LMCacheError) -> None:
        if self._backoff_s == FIRST_BACKOFF_S:
            logger.warning("no sidecar, going on without a cache: %s", cause)
        self._connection = None
        self._next_try = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


def _handle(chunk: Chunk, connection: SidecarConnection | None) -> int:
    memory = chunk.memory
    assert isinstance(memory, ArenaExtent)
    return memory.handle if memory.connection is connection else 0
