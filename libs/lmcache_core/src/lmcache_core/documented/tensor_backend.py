"""Chunks as plain tensors, one key each: the documented interface, and an implementation over the
tiers. Needs torch.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from lmcache_core._typing import override
from lmcache_core.errors import RecordError
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.views import tensor_over
from lmcache_core.record import RAW_SERDE, UNSEALED_DIGEST, Chunk, raw_header
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.storage.hot import LocalCPUBackend

if TYPE_CHECKING:
    from lmcache_core.record.chunk_store import ChunkStore

logger = logging.getLogger(__name__)


class LMCBackendInterface(ABC):
    """Stores tensors by key.

    Args:
        dst_device: Device of retrieved tensors: "cpu", "cuda", "cuda:1" and so on.

    Raises:
        RuntimeError: Unknown kind of device.
    """

    def __init__(self, dst_device: str = "cuda") -> None:
        torch.device(dst_device)
        self.dst_device = dst_device

    @abstractmethod
    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Store the KV of a chunk of tokens.

        Args:
            key: Its key.
            kv_chunk: One tensor, without a batch dimension.
            blocking: Return when it can be retrieved.
        """

    @abstractmethod
    def contains(self, key: CacheEngineKey) -> bool:
        """Return whether a chunk can be retrieved."""

    @abstractmethod
    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return a chunk as it was stored, on `dst_device`; None if it does not exist."""

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[CacheEngineKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """Store several chunks; see `put`. Returns the number of chunks passed."""
        num_chunks = 0
        for key, kv_chunk in keys_and_chunks:
            self.put(key, kv_chunk, blocking=blocking)
            num_chunks += 1
        return num_chunks

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Return several chunks, one after the other on demand; see `get`."""
        for key in keys:
            yield self.get(key)

    @abstractmethod
    def close(self) -> None:
        """Release what the backend holds. Idempotent."""


class StackTensorBackend(LMCBackendInterface):
    """Tensors of any shape and known dtype over the tiers of a chunk store. Thread-safe.

    A chunk is visible (to `contains` and `get` of all users of the store) once host memory has it;
    slower tiers follow in the background, regardless of `blocking`. A chunk without room is not
    stored. A retrieved tensor is an independent copy.

    Args:
        store: An open store; closed with this backend.
        dst_device: See `LMCBackendInterface`.
    """

    def __init__(self, store: ChunkStore, dst_device: str = "cuda") -> None:
        super().__init__(dst_device)
        self._store = store

    @override
    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Copy a tensor into host memory; it is visible on return, blocking or not.

        Args:
            key: Its key.
            kv_chunk: On any device, contiguous or not.
            blocking: Without effect.

        Raises:
            ValueError: A record cannot hold a tensor of its dtype or shape.
        """
        header = raw_header(key, kv_chunk.shape, kv_chunk.dtype, UNSEALED_DIGEST)
        spec = header.tensors[0]
        try:
            header.check(spec.length)
        except RecordError as exc:
            raise ValueError(f"kv_chunk of shape {tuple(kv_chunk.shape)}: {exc}") from exc
        (memory,) = self._store.reserve([key], [spec.shape], spec.dtype)
        if isinstance(memory, NotLent):
            logger.debug("chunk is not stored: reason=%s num_bytes=%d", memory, spec.length)
            return
        name = ChunkKey(DEFAULT_TENANT, key)
        chunk = Chunk.unsealed(name, header, memory, LocalCPUBackend.name)
        try:
            tensor_over(memory.byte_array, spec.shape, spec.dtype).copy_(kv_chunk.detach())
            if self._store.needs_digests:
                chunk.sealed()
            self._store.put([chunk])
        finally:
            self._store.release([chunk])

    @override
    def contains(self, key: CacheEngineKey) -> bool:
        return self._store.lookup([key], None) == 1

    @override
    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return a copy on `dst_device`; None if the chunk is missing, damaged, late, or not a
        single raw tensor.
        """
        chunks = self._store.get([key])
        tensor = None
        try:
            for chunk in chunks:
                header = chunk.described
                if header.serde == RAW_SERDE and len(header.tensors) == 1:
                    [spec] = header.tensors
                    stored = tensor_over(chunk.memory.byte_array, spec.shape, spec.dtype)
                    tensor = stored.to(self.dst_device, copy=True)
        finally:
            were_held = self._store.release(chunks)
        return tensor if were_held else None

    @override
    def close(self) -> None:
        self._store.close()
