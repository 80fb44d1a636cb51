"""What a process serves over lm://: the chunks of its own tiers, by default never those of its
peers or of its remote tier, and to each client only what it can decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.buffer import BufferAllocator
from lmcache_core.record import RAW_SERDE, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.serde.codec import ChunkCodec
from lmcache_core.storage.codecs import Codecs, encoded_chunk
from lmcache_core.storage.disk.pool import ChunkJob, finish
from lmcache_core.storage.stack import DEFAULT_TIMEOUT_S, LOCAL_TIERS, TierStack
from lmcache_core.storage.unusable import UnusableRecords
from lmcache_core.telemetry import CodecFigures
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.served import AdaptsToClients, ServedStore


class LocalStore(ServedStore):
    """A `ServedStore` over the local tiers of a stack, or over the tiers that are named.

    Args:
        accepts_puts: Queried at every PUT and its allocation: False while draining, or always for a
            read-only store.
        timeout_s: Longest wait for slower tiers in one request.
        tiers: Names of the tiers that are served; None: all.
    """

    def __init__(
        self,
        stack: TierStack,
        accepts_puts: Callable[[], bool],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tiers: Sequence[str] | None = LOCAL_TIERS,
    ) -> None:
        self._stack = stack
        self._tiers = tiers
        self._accepts_puts = accepts_puts
        self._timeout_s = timeout_s

    @override
    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        return self._stack.hot.receive(num_bytes, tenant) if self._accepts_puts() else None

    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [
            tier is not None
            for tier in await self._stack.batched_tiers(keys, self._timeout_s, self._tiers)
        ]

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        return await self._stack.batched_get(keys, self._timeout_s, search_range=self._tiers)

    @override
    async def put(self, chunk: Chunk) -> bool:
        if not self._accepts_puts():
            return False
        (is_kept,) = await self._stack.batched_put([chunk])
        return is_kept

    @override
    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        return await self._stack.batched_remove(keys, self._tiers)


class WrappedStore(ServedStore):
    """A `ServedStore` that forwards everything to another one."""

    def __init__(self, store: ServedStore) -> None:
        self._store = store

    @override
    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        return self._store.allocate(num_bytes, tenant)

    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._store.contains(keys)

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        return await self._store.get(keys)

    @override
    async def put(self, chunk: Chunk) -> bool:
        return await self._store.put(chunk)

    @override
    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        return await self._store.remove(keys)


class LosslessStore(WrappedStore):
    """A store as seen by clients that accept only lossless records: a lossy record is a miss,
    counts as absent, and is replaced by a lossless one.

    Args:
        replaceable: Records known to be lossy.
    """

    def __init__(self, store: ServedStore, replaceable: UnusableRecords | None = None) -> None:
        super().__init__(store)
        self._replaceable = UnusableRecords() if replaceable is None else replaceable

    def over(self, store: ServedStore) -> LosslessStore:
        """Return the same view of some of the tiers; it knows the lossy records that this one
        has read.
        """
        return LosslessStore(store, self._replaceable)

    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks a `get` would find now. That a record is lossy is known only after it
        has been read.
        """
        found = await self._store.contains(keys)
        return [
            is_there and key not in self._replaceable
            for key, is_there in zip(keys, found, strict=True)
        ]

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        return [self._let_out(result) for result in await self._store.get(keys)]

    @override
    async def put(self, chunk: Chunk) -> bool:
        if chunk.key in self._replaceable and not chunk.lossy:
            # From every tier: tiers that are written later would keep their old record.
            await self._store.remove([chunk.key])
            self._replaceable.forget([chunk.key])
        return await self._store.put(chunk)

    @override
    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        num_removed = await self._store.remove(keys)
        self._replaceable.forget(keys)
        return num_removed

    def _let_out(self, result: Result) -> Result:
        if isinstance(result, Miss):
            return result
        if not result.lossy:
            self._replaceable.forget([result.key])
            return result
        self._replaceable.note(result.key)
        result.release()
        return Miss(MissReason.ENCODING)


MAX_ENCODING_BYTES = 128 << 20
"""Raw bytes encoded for peers at the same time; further chunks are sent raw, since waiting may take
longer than sending.
"""
MAX_SENDING_BYTES = 256 << 20
"""Encoded bytes that may wait to be sent."""


class EncodingStore(WrappedStore, AdaptsToClients):
    """Serves raw chunks encoded, to clients that can decode the serde and, if it is lossy, accept
    lossy data.

    All others get raw chunks, and lossy records only if they accept them.

    Args:
        codecs: Codecs that are open while this store serves.
        serde: Encoding of chunks, one that `codecs` was made with; "naive": none.

    Attributes:
        encoding_bytes: Raw bytes being encoded now.
    """

    def __init__(self, store: ServedStore, codecs: Codecs, serde: str) -> None:
        super().__init__(store)
        self._lossless = LosslessStore(store)
        self._codec = codecs.named(serde)
        self._threads = codecs.encoding
        self._figures = CodecFigures(whole=codecs.figures)
        self._memory = BufferAllocator(capacity_bytes=MAX_SENDING_BYTES)
        self.encoding_bytes = 0

    @override
    def for_client(self, accepts: Accepts) -> ServedStore:
        store, codec = self._store if accepts.lossy else self._lossless, self._codec
        if (
            codec is None
            or codec.serde not in accepts.serdes
            or (codec.lossy and not accepts.lossy)
        ):
            return store
        return _EncodedView(store, codec, self)

    def stats(self) -> dict[str, int]:
        """Return the encoding figures, and how many encoded bytes wait to be sent."""
        return self._figures.stats() | {"sending_bytes": self._memory.used_bytes}

    def begin_encoding(self, codec: ChunkCodec, chunk: Chunk) -> ChunkJob[Chunk | None]:
        """Encode a chunk (borrowed) in a thread, into memory that is counted; the result is None if
        it is to be sent unchanged.
        """
        chunk.memory.ref_count_up()
        return self._threads.begin(self._encode, codec, chunk, unrun=chunk.release)

    def _encode(self, codec: ChunkCodec, chunk: Chunk) -> Chunk | None:
        try:
            encoded = encoded_chunk(codec, chunk, self._figures)
        finally:
            chunk.release()
        if encoded is None:
            return None
        memory = self._memory.allocate((encoded.memory.get_size(),), None)
        if memory is None:
            return None
        memory.byte_array[:] = encoded.memory.byte_array
        return encoded.moved(memory, encoded.tier)


class _EncodedView(WrappedStore):
    """An `EncodingStore` as seen by a client that decodes the serde."""

    def __init__(self, store: ServedStore, codec: ChunkCodec, owner: EncodingStore) -> None:
        super().__init__(store)
        self._codec = codec
        self._owner = owner

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        results = await self._store.get(keys)
        owner = self._owner
        jobs: dict[int, ChunkJob[Chunk | None]] = {}
        num_bytes = 0
        try:
            for i, result in enumerate(results):
                if isinstance(result, Miss) or result.described.serde != RAW_SERDE:
                    continue
                size = result.memory.get_size()
                if owner.encoding_bytes + size <= MAX_ENCODING_BYTES:
                    jobs[i] = owner.begin_encoding(self._codec, result)
                    owner.encoding_bytes += size
                    num_bytes += size
            await finish(jobs.values())
        except BaseException:
            for job in jobs.values():
                job.abandon()
            release_all(results)
            raise
        finally:
            owner.encoding_bytes -= num_bytes
        for i, job in jobs.items():
            encoded, raw = job.take(None, None), results[i]
            if encoded is not None and isinstance(raw, Chunk):
                raw.release()
                results[i] = encoded
        return results
