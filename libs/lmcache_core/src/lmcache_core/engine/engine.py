"""The cache engine: `retrieve` and `store` between a serving engine's KV and the tiers.

The one data path, in five hops: `LMCacheEngine.retrieve` -> `TokenDatabase.process_tokens` -> `ChunkStore.get` -> (tiers) ->
`GPUConnectorInterface.to_gpu`; `store` is its mirror.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine.chunk_store import ChunkStore
from lmcache_core.engine.stores import create_chunk_store
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import RAW_SERDE, Chunk, MissReason, encode_head, payload_digest, raw_header
from lmcache_core.telemetry import (
    MISSED_CHUNKS_TOTAL,
    REQUESTED_TOKENS_TOTAL,
    RETRIEVED_BYTES_TOTAL,
    RETRIEVED_CHUNKS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
    Counters,
)
from lmcache_core.token_database.base import MultimodalSpan, TokenDatabase

HOT_TIER = "Hot"
_NamedChunk = tuple[int, int, CacheEngineKey]


class LMCacheEngine:
    """Stores and retrieves the KV of token prefixes.

    `open` before use, `close` after it (`LMCacheEngineBuilder` does both). Thread-safe.

    Args:
        config: Options.
        metadata: What the KV is.
        memory_allocator: Host memory for chunks in embedded mode; None with a sidecar, whose arena is used.
        token_database: Names chunks.
        gpu_connector: Copies between the serving engine's KV and memory objects.
        store: Where chunks are kept; by default what the config says (embedded tiers, or the sidecar).
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        memory_allocator: MemoryAllocatorInterface | None,
        token_database: TokenDatabase,
        gpu_connector: GPUConnectorInterface,
        store: ChunkStore | None = None,
    ) -> None:
        self.config = config
        self.metadata = metadata
        self.counters = Counters()
        self._token_database = token_database
        self._gpu_connector = gpu_connector
        self._store = store or create_chunk_store(config, metadata, memory_allocator, self.counters)

    def open(self) -> None:
        """Start the tiers, or connect to the sidecar. An absent remote tier or sidecar is not an error."""
        self._store.open(self._token_database.use_salt)

    def close(self) -> None:
        """Finish or abandon background work and free everything. Idempotent."""
        self._store.close()

    def store(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, spans: Sequence[MultimodalSpan] = (), **kwargs: Any) -> None:
        """Keep the KV of these tokens; returns before slow tiers have written.

        Args:
            tokens: Token ids, shape `[seq_len]`, any integer dtype.
            mask: Booleans, shape `[seq_len]`, Falses first: tokens whose KV is already kept.
            spans: Images and the like behind placeholder tokens; without them equal placeholders would share KV.
            **kwargs: For the GPU connector, for example `kvcaches`.

        Raises:
            ValueError: The number of Falses in the mask is not a multiple of the chunk size, or engine memory is not as declared.
        """
        named = list(self._token_database.process_tokens(tokens, mask, spans))
        known = self._store.lookup([key for _, _, key in named], [HOT_TIER])
        named = named[known:]
        if not named:
            return
        shapes = [self._gpu_connector.get_shape(end - start) for start, end, _ in named]
        reserved = self._store.reserve(shapes, self.metadata.kv_dtype_name)
        put: list[Chunk] = []
        try:
            filled: list[Chunk] = []
            for (start, end, key), memory in zip(named, takewhile(lambda obj: obj is not None, reserved), strict=False):
                assert memory is not None
                self._gpu_connector.from_gpu(memory, start, end, **kwargs)
                filled.append(self._describe(key, memory))
            put = filled
            self._count_stored(put, self._store.put(put), len(named))
        finally:
            self._store.release(put)
            self._store.abort([memory for memory in reserved[len(put) :] if memory is not None])

    def retrieve(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, spans: Sequence[MultimodalSpan] = (), **kwargs: Any
    ) -> torch.Tensor:
        """Put the cached KV of the longest prefix of these tokens into the serving engine.

        Args:
            tokens: Token ids, shape `[seq_len]`, any integer dtype.
            mask: Booleans, shape `[seq_len]`, Falses first: tokens that are not wanted.
            spans: As in `store`.
            **kwargs: For the GPU connector, for example `kvcaches`.

        Returns:
            Booleans on CPU, shape `[seq_len]`: True where KV has been put into the serving engine.

        Raises:
            ValueError: The number of Falses in the mask is not a multiple of the chunk size, or engine memory is not as declared.
        """
        named = list(self._token_database.process_tokens(tokens, mask, spans))
        loaded = torch.zeros(len(tokens), dtype=torch.bool)
        self.counters.add(REQUESTED_TOKENS_TOTAL, sum(end - start for start, end, _ in named))
        chunks = self._store.get([key for _, _, key in named])
        num_loaded = 0
        try:
            for (start, end, key), chunk in zip(named, chunks, strict=False):
                if chunk.key.key != key or not self._fits(chunk, end - start):
                    self.counters.add(MISSED_CHUNKS_TOTAL, len(chunks) - num_loaded, MissReason.LAYOUT)
                    break
                self._gpu_connector.to_gpu(_as_kv(chunk), start, end, **kwargs)
                num_loaded += 1
        finally:
            were_held = self._store.release(chunks)
        if not were_held:
            self.counters.add(MISSED_CHUNKS_TOTAL, num_loaded, MissReason.UNAVAILABLE)
            return loaded
        for (start, end, _), chunk in zip(named, chunks[:num_loaded], strict=False):
            loaded[start:end] = True
            self._count_retrieved(chunk, end - start)
        return loaded

    def lookup(self, tokens: torch.Tensor, search_range: list[str] | None = None, spans: Sequence[MultimodalSpan] = ()) -> int:
        """How many tokens, from the first, are cached.

        Args:
            tokens: Token ids, shape `[seq_len]`, any integer dtype.
            search_range: Names of tiers ("Hot", "LocalDiskBackend", "P2PBackend", "RemoteBackend"); None means all.
            spans: As in `store`.
        """
        named = list(self._token_database.process_tokens(tokens, None, spans))
        num_prefix = self._store.lookup([key for _, _, key in named], search_range)
        return named[num_prefix - 1][1] if num_prefix else 0

    def prefetch(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, spans: Sequence[MultimodalSpan] = ()) -> None:
        """Begin to lift the KV of these tokens into host memory; returns at once.

        Args:
            tokens: Token ids, shape `[seq_len]`.
            mask: As in `retrieve`.
            spans: As in `store`.
        """
        self._store.prefetch([key for _, _, key in self._token_database.process_tokens(tokens, mask, spans)])

    def stats(self) -> dict[str, dict[str, int]]:
        """Figures of the tiers, by name."""
        return self._store.stats()

    def _describe(self, key: CacheEngineKey, memory: MemoryObj) -> Chunk:
        header = raw_header(key, memory.metadata.shape, self.metadata.kv_dtype_name, payload_digest(memory.byte_array))
        return Chunk(ChunkKey(DEFAULT_TENANT, key), header, encode_head(header, memory.get_size()), memory, HOT_TIER)

    def _fits(self, chunk: Chunk, num_tokens: int) -> bool:
        """Whether the payload is exactly the KV that the connector takes: raw, lossless, one tensor and nothing else."""
        header = chunk.header
        if header.serde != RAW_SERDE or header.lossy or len(header.tensors) != 1:
            return False
        spec = header.tensors[0]
        has_shape = tuple(spec.shape) == tuple(self._gpu_connector.get_shape(num_tokens)) and spec.dtype == self.metadata.kv_dtype_name
        return has_shape and spec.offset == 0 and spec.length == chunk.memory.get_size()

    def _count_stored(self, chunks: Sequence[Chunk], stored: Sequence[bool], num_wanted: int) -> None:
        self.counters.add(STORED_CHUNKS_TOTAL, sum(stored))
        self.counters.add(STORED_BYTES_TOTAL, sum(c.memory.get_size() for c, kept in zip(chunks, stored, strict=True) if kept))
        self.counters.add(UNSTORED_CHUNKS_TOTAL, num_wanted - sum(stored))

    def _count_retrieved(self, chunk: Chunk, num_tokens: int) -> None:
        self.counters.add(RETRIEVED_TOKENS_TOTAL, num_tokens, chunk.tier)
        self.counters.add(RETRIEVED_CHUNKS_TOTAL, 1, chunk.tier)
        self.counters.add(RETRIEVED_BYTES_TOTAL, chunk.memory.get_size(), chunk.tier)


def _as_kv(chunk: Chunk) -> MemoryObj:
    """The chunk's bytes as the KV_BLOB that its header describes; borrows the chunk's reference."""
    spec = chunk.header.tensors[0]
    metadata = MemoryObjMetadata(torch.Size(spec.shape), spec.dtype, 0, 0, 1, MemoryFormat.KV_BLOB)
    return BytesBufferMemoryObj(chunk.memory.byte_array, metadata)
