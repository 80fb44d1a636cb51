"""Chunks between the serving engine's memory and the chunk store."""

from __future__ import annotations

import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine.digests import FillingDigest, FollowingDigest
from lmcache_core.gpu_connectors.base import (
    DescribesTensors,
    GPUConnectorInterface,
    OrderedGPUConnector,
)
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import (
    HOT_TIER,
    RAW_SERDE,
    UNSEALED_DIGEST,
    Chunk,
    MissReason,
    RecordHeader,
    TensorSpec,
    payload_digest,
    raw_header,
)
from lmcache_core.record.chunk_store import ChunkStore
from lmcache_core.telemetry import (
    MISSED_CHUNKS_TOTAL,
    RETRIEVED_BYTES_TOTAL,
    RETRIEVED_CHUNKS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
    Counters,
)

MAX_REMEMBERED_KEYS = 1 << 14
NamedChunk = tuple[int, int, CacheEngineKey]
"""First token, one past the last, key."""


class KVTransfer:
    """Fills chunks from the serving engine and the serving engine from chunks.

    Args:
        store: Where chunks are kept.
        gpu_connector: Copies between the serving engine's KV and memory objects.
        metadata: What the KV is.
        counters: Where chunks are counted.
        workers: Threads for digests.
        unit_tokens: Tokens in what the connector counts as one: more than 1 where it moves
            whole blocks.
    """

    def __init__(
        self,
        store: ChunkStore,
        gpu_connector: GPUConnectorInterface,
        metadata: LMCacheEngineMetadata,
        counters: Counters,
        workers: Workers,
        unit_tokens: int = 1,
    ) -> None:
        self._unit_tokens = unit_tokens
        self._store = store
        self._gpu_connector = gpu_connector
        self._describes = gpu_connector if isinstance(gpu_connector, DescribesTensors) else None
        self._is_ordered = isinstance(gpu_connector, OrderedGPUConnector)
        self._dtype = metadata.kv_dtype_name
        self._counters = counters
        self._workers = workers
        self._loaded_with_loss = LoadedWithLoss()

    def store(self, named: Sequence[NamedChunk], kwargs: dict[str, Any]) -> list[bool]:
        """Copy these chunks out of the serving engine and make them visible, as many from the first
        as there is memory for.

        Returns:
            Of each whether it is visible now.
        """
        shapes = [self._gpu_connector.get_shape(end - start) for start, end, _ in named]
        reserved = self._store.reserve(shapes, self._dtype)
        put: list[Chunk] = []
        digests: list[Future[bytes]] = []
        try:
            filled: list[Chunk] = []
            for (start, end, key), memory in zip(
                named, takewhile(lambda obj: obj is not None, reserved), strict=False
            ):
                assert memory is not None
                if self._store.needs_digests:
                    digests.append(self._fill_and_digest(memory, start, end, kwargs))
                else:
                    self._gpu_connector.from_gpu(memory, start, end, **kwargs)
                filled.append(self._describe(key, memory, end - start))
            put = (
                [
                    chunk.sealed_with(digest.result())
                    for chunk, digest in zip(filled, digests, strict=True)
                ]
                if digests
                else filled
            )
            stored = self._store.put(put)
            self._count_stored(put, stored, len(named))
        finally:
            wait(digests)  # memory that is given back must not be read any more
            self._store.release(put)
            self._store.abort([memory for memory in reserved[len(put) :] if memory is not None])
        return stored + [False] * (len(named) - len(stored))

    def load(
        self,
        named: Sequence[NamedChunk],
        recompute_s: float | None,
        kwargs: dict[str, Any],
        wanted: tuple[int, int] | None = None,
    ) -> int:
        """Copy chunks into the serving engine.

        Args:
            named: Which; in order.
            recompute_s: What recomputing one of them costs, None when not known.
            kwargs: For the GPU connector.
            wanted: First token, one past the last, to be written; of chunks that reach beyond,
                only the part inside. None: everything.

        Returns:
            How many, from the first, are there now.
        """
        chunks = self._store.get([key for _, _, key in named], recompute_s, check_later=True)
        num_loaded = 0
        try:
            for (start, end, key), chunk in zip(named, chunks, strict=False):
                reason = self._misfit(chunk, key, end - start)
                if reason is None and not self._copy_wanted(chunk, start, end, kwargs, wanted):
                    reason = MissReason.CORRUPT
                    self._store.reject(chunk)
                if reason is not None:
                    self._counters.add(MISSED_CHUNKS_TOTAL, len(chunks) - num_loaded, reason)
                    break
                self._loaded_with_loss.note(key, chunk.lossy)
                num_loaded += 1
        finally:
            were_held = self._store.release(chunks)
        if not were_held:
            self._counters.add(MISSED_CHUNKS_TOTAL, num_loaded, MissReason.UNAVAILABLE)
            return 0
        for (start, end, _), chunk in zip(named, chunks[:num_loaded], strict=False):
            self._count_retrieved(chunk, end - start)
        return num_loaded

    def through_store(self, memory: MemoryObj) -> MemoryObj:
        """Return a copy of that memory that has been through the chunk store; the memory itself
        when the store takes nothing just now.
        """
        shape = tuple(memory.metadata.shape)
        key = CacheEngineKey("canary", "canary", 1, 0, secrets.token_hex(32))
        (reserved,) = self._store.reserve([shape], self._dtype)
        if reserved is None:
            return memory
        reserved.byte_array[:] = memory.byte_array
        header = raw_header(key, shape, self._dtype, UNSEALED_DIGEST)
        put = [Chunk.unsealed(ChunkKey(DEFAULT_TENANT, key), header, reserved, HOT_TIER)]
        try:
            self._store.put(put)
        finally:
            self._store.release(put)
        chunks = self._store.get([key])
        try:
            return (
                BytesBufferMemoryObj(bytes(chunks[0].memory.byte_array), memory.metadata)
                if chunks
                else memory
            )
        finally:
            self._store.release(chunks)
            self._store.forget([key])

    def _fill_and_digest(
        self, memory: MemoryObj, start: int, end: int, kwargs: dict[str, Any]
    ) -> Future[bytes]:
        """Copy a chunk out of the serving engine; its digest follows in another thread."""
        digest = FillingDigest(memory.byte_array, self._workers)
        try:
            self._gpu_connector.from_gpu(
                memory, start, end, **self._followed(kwargs, digest.filled)
            )
            return digest.finish()
        except BaseException:
            digest.abandon()
            raise

    def _copy_wanted(
        self,
        chunk: Chunk,
        start: int,
        end: int,
        kwargs: dict[str, Any],
        wanted: tuple[int, int] | None,
    ) -> bool:
        """Copy only the tokens that are wanted; see `_copy`."""
        low, high = (start, end) if wanted is None else (max(start, wanted[0]), min(end, wanted[1]))
        if (low, high) == (start, end):
            return self._copy(chunk, start, end, kwargs)
        if chunk.is_unchecked and payload_digest(chunk.memory.byte_array) != chunk.header.digest:
            return False
        if low < high:
            self._gpu_connector.to_gpu(
                self._part(chunk, end - start, low - start, high - start), low, high, **kwargs
            )
        return True

    def _copy(self, chunk: Chunk, start: int, end: int, kwargs: dict[str, Any]) -> bool:
        """Copy a chunk into the serving engine; False when its bytes do not have its digest,
        where that was still to be checked.
        """
        kv = self._as_kv(chunk, end - start)
        if not chunk.is_unchecked:
            self._gpu_connector.to_gpu(kv, start, end, **kwargs)
            return True
        digest = FollowingDigest(chunk.memory.byte_array)
        self._gpu_connector.to_gpu(kv, start, end, **self._followed(kwargs, digest.copied))
        return digest.finish() == chunk.header.digest

    def _followed(self, kwargs: dict[str, Any], progress: Callable[[int], None]) -> dict[str, Any]:
        """Return the connector's arguments, so that it tells how far it is, if it can."""
        return {**kwargs, "progress": progress} if self._is_ordered else kwargs

    def _describe(self, key: CacheEngineKey, memory: MemoryObj, num_tokens: int) -> Chunk:
        is_lossy = key in self._loaded_with_loss
        header = RecordHeader(
            key.canonical(), RAW_SERDE, "", is_lossy, self._tensors(num_tokens), UNSEALED_DIGEST
        )
        return Chunk.unsealed(ChunkKey(DEFAULT_TENANT, key), header, memory, HOT_TIER)

    def _tensors(self, num_tokens: int) -> tuple[TensorSpec, ...]:
        if self._describes is not None:
            return self._describes.tensor_specs(num_tokens)
        shape = tuple(self._gpu_connector.get_shape(num_tokens))
        return (TensorSpec("", self._dtype, shape, 0, num_bytes(shape, self._dtype)),)

    def _misfit(self, chunk: Chunk, key: CacheEngineKey, num_tokens: int) -> MissReason | None:
        """Return why a chunk is not exactly the KV that the connector takes (raw, these tensors and
        nothing else); None if it is.

        Whether it may have been encoded with loss is decided where it comes in, by the tier that it
        comes from.
        """
        if chunk.key.key != key:
            return MissReason.IDENTITY
        header, tensors = chunk.described, self._tensors(num_tokens)
        is_kv = header.serde == RAW_SERDE and header.tensors == tensors
        is_whole = chunk.memory.get_size() == tensors[-1].offset + tensors[-1].length
        return None if is_kv and is_whole else MissReason.LAYOUT

    def _as_kv(self, chunk: Chunk, num_tokens: int) -> MemoryObj:
        """Return the chunk's bytes as the KV_BLOB that the connector takes; borrows the chunk's
        reference.
        """
        shape = torch.Size(self._gpu_connector.get_shape(num_tokens))
        return BytesBufferMemoryObj(
            chunk.memory.byte_array,
            MemoryObjMetadata(shape, self._dtype, 0, 0, 1, MemoryFormat.KV_BLOB),
        )

    def _part(self, chunk: Chunk, num_tokens: int, low: int, high: int) -> MemoryObj:
        """Return tokens `[low, high)` of a chunk of so many, as a KV_BLOB of its own."""
        whole = np.frombuffer(chunk.memory.byte_array, np.uint8)
        specs = self._tensors(high - low)
        part = np.zeros(specs[-1].offset + specs[-1].length, np.uint8)
        for spec, of_whole in zip(specs, self._tensors(num_tokens), strict=True):
            token_bytes = of_whole.length // math.prod(of_whole.shape[:-1])
            tokens = whole[of_whole.offset : of_whole.offset + of_whole.length].reshape(
                -1, num_tokens, token_bytes
            )
            part[spec.offset : spec.offset + spec.length] = tokens[:, low:high].reshape(-1)
        shape = torch.Size(self._gpu_connector.get_shape(high - low))
        return BytesBufferMemoryObj(
            part.data, MemoryObjMetadata(shape, self._dtype, 0, 0, 1, MemoryFormat.KV_BLOB)
        )

    def _count_stored(
        self, chunks: Sequence[Chunk], stored: Sequence[bool], num_wanted: int
    ) -> None:
        self._counters.add(STORED_CHUNKS_TOTAL, sum(stored))
        self._counters.add(
            STORED_BYTES_TOTAL,
            sum(c.memory.get_size() for c, kept in zip(chunks, stored, strict=True) if kept),
        )
        self._counters.add(UNSTORED_CHUNKS_TOTAL, num_wanted - sum(stored))

    def _count_retrieved(self, chunk: Chunk, num_tokens: int) -> None:
        self._counters.add(RETRIEVED_TOKENS_TOTAL, num_tokens * self._unit_tokens, chunk.tier)
        self._counters.add(RETRIEVED_CHUNKS_TOTAL, 1, chunk.tier)
        self._counters.add(RETRIEVED_BYTES_TOTAL, chunk.memory.get_size(), chunk.tier)


class LoadedWithLoss:
    """Keys of chunks that the serving engine loaded with loss; the oldest go first. Thread-safe.

    The serving engine may store such a chunk again once no tier of this process has it any more.
    Its values are still not the computed ones and must not be stored as if they were.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[CacheEngineKey, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: CacheEngineKey) -> bool:
        with self._lock:
            return key in self._keys

    def note(self, key: CacheEngineKey, is_lossy: bool) -> None:
        """Note that a chunk has just been loaded, and whether with loss."""
        with self._lock:
            self._keys.pop(key, None)
            if is_lossy:
                self._keys[key] = None
                if len(self._keys) > MAX_REMEMBERED_KEYS:
                    self._keys.popitem(last=False)
