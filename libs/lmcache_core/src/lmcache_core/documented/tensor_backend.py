"""Chunks as plain tensors, one key each: the documented interface, and its implementation over
the tiers. Needs torch.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import torch

from lmcache_core._typing import override
from lmcache_core.errors import RecordError
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.views import tensor_over
from lmcache_core.record import RAW_SERDE, UNSEALED_DIGEST, Chunk, RecordHeader, raw_header
from lmcache_core.storage.hot import LocalCPUBackend

logger = logging.getLogger(__name__)

BATCH_CHUNKS = 16
"""Chunks of host memory that one batched call holds at once."""
MAX_PENDING_PUTS = 64
"""Batches that wait to be made visible; the next put waits for one of them."""

KeyedTensor = tuple[CacheEngineKey, torch.Tensor]


class LMCBackendInterface(ABC):
    """Stores tensors by key.

    Args:
        dst_device: Where retrieved tensors lie: "cpu", "cuda", "cuda:1" and so on.

    Raises:
        RuntimeError: No such kind of device.
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
        """Return a chunk as it was stored, on `dst_device`; None when it is not there."""

    def batched_put(self, keys_and_chunks: Iterable[KeyedTensor], blocking: bool = True) -> int:
        """Store several chunks; see `put`. Returns how many were given."""
        num_chunks = 0
        for key, kv_chunk in keys_and_chunks:
            self.put(key, kv_chunk, blocking=blocking)
            num_chunks += 1
        return num_chunks

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Return several chunks, one after the other as they are asked for; see `get`."""
        for key in keys:
            yield self.get(key)

    @abstractmethod
    def close(self) -> None:
        """Give up what the backend holds. Idempotent."""


class TensorStore(Protocol):
    """What a tensor backend needs of storage; `StorageManager` has it, and the engine's other
    chunk stores do.
    """

    @property
    def needs_digests(self) -> bool:
        """Whether chunks should come to `put` with their digests."""

    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        """Return how many chunks, from the first, are cached."""

    def reserve(self, shapes: Sequence[Sequence[int]], dtype: str) -> list[MemoryObj | None]:
        """Return memory to fill, one object a shape, None where there is no room."""

    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store the KV of a chunk. The tensor has been copied on return, blocking or not."""

    def get(self, keys: Sequence[CacheEngineKey]) -> list[Chunk]:
        """Return the longest prefix of these chunks that can be had in time, verified; each goes to
        `release`.
        """

    def release(self, chunks: Sequence[Chunk]) -> bool:
        """Give references back; False when what was read from them may have been overwritten."""

    def close(self) -> None:
        """Stop. Idempotent."""


class StackTensorBackend(LMCBackendInterface):
    """Tensors of any shape and known dtype over the tiers of a chunk store. Thread-safe.

    A chunk is visible (to `contains` and `get` of everybody who shares the store) when host memory
    has it; slower tiers follow in the background, as fast as they can, whatever `blocking` says. A
    chunk that finds no room is not stored. A tensor that was retrieved is a copy of its own, which
    nothing here touches again.

    Args:
        store: Opened; closed with this backend.
        dst_device: See `LMCBackendInterface`.
    """

    def __init__(self, store: TensorStore, dst_device: str = "cuda") -> None:
        super().__init__(dst_device)
        self._store = store
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="lmcache-tensor-put")
        self._turns = threading.BoundedSemaphore(MAX_PENDING_PUTS)

    @override
    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """The tensor has been copied when this returns, be it
        blocking or not.

        Args:
            key: Its key.
            kv_chunk: On any device, contiguous or not.
            blocking: Return when it is visible; otherwise that happens soon, in a thread, in the
                order of the puts.

        Raises:
            ValueError: A record cannot hold a tensor of its dtype or shape.
            RuntimeError: The backend is closed, and it is not blocking.
        """
        self.batched_put([(key, kv_chunk)], blocking)

    @override
    def contains(self, key: CacheEngineKey) -> bool:
        """Ask all tiers."""
        return self._store.lookup([key], None) == 1

    @override
    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return what is damaged, late, or no single raw tensor is not there."""
        tensors = self._copies([key])
        return tensors[0] if tensors else None

    def batched_put(self, keys_and_chunks: Iterable[KeyedTensor], blocking: bool = True) -> int:
        """See `put`, `BATCH_CHUNKS` at a time.

        Returns:
            How many were stored; not blocking, how many found room.
        """
        num_stored = 0
        given = iter(keys_and_chunks)
        while batch := list(islice(given, BATCH_CHUNKS)):
            chunks = self._filled(batch)
            num_stored += self._publish(chunks) if blocking else self._publish_soon(chunks)
        return num_stored

    @override
    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield several chunks, `BATCH_CHUNKS` read at a time."""
        asked = iter(keys)
        while rest := list(islice(asked, BATCH_CHUNKS)):
            while rest:
                tensors = self._copies(rest[: self._store.lookup(rest, None)])
                yield from tensors
                if len(tensors) < len(rest):
                    yield None
                rest = rest[len(tensors) + 1 :]

    def close(self) -> None:
        """Make visible what waits for it, then close the store. Idempotent."""
        self._publisher.shutdown()
        self._store.close()

    def _filled(self, batch: Sequence[KeyedTensor]) -> list[Chunk]:
        """Return copies of the tensors that found room."""
        chunks: list[Chunk] = []
        try:
            for key, tensor in batch:
                header = _header_of(key, tensor)
                spec = header.tensors[0]
                (memory,) = self._store.reserve([spec.shape], spec.dtype)
                if memory is None:
                    logger.debug("no room for a chunk of %d bytes", spec.length)
                    continue
                chunks.append(
                    Chunk.unsealed(
                        ChunkKey(DEFAULT_TENANT, key), header, memory, LocalCPUBackend.name
                    )
                )
                tensor_over(memory.byte_array, spec.shape, spec.dtype).copy_(tensor.detach())
        except BaseException:
            self._store.release(chunks)
            raise
        return chunks

    def _publish(self, chunks: Sequence[Chunk]) -> int:
        try:
            if self._store.needs_digests:
                for chunk in chunks:
                    chunk.sealed()
            return sum(self._store.put(chunks)) if chunks else 0
        finally:
            self._store.release(chunks)

    def _publish_soon(self, chunks: Sequence[Chunk]) -> int:
        self._turns.acquire()
        try:
            done = self._publisher.submit(self._publish, chunks)
        except BaseException:
            self._turns.release()
            self._store.release(chunks)
            raise
        done.add_done_callback(self._published)
        return len(chunks)

    def _published(self, done: Future[int]) -> None:
        self._turns.release()
        if (failure := done.exception()) is not None:
            logger.error("chunks could not be made visible: %s", failure)

    def _copies(self, keys: Sequence[CacheEngineKey]) -> list[torch.Tensor]:
        """Return the longest prefix of these chunks as tensors of their own."""
        if not keys:
            return []
        chunks = self._store.get(keys)
        tensors: list[torch.Tensor] = []
        try:
            for chunk in chunks:
                tensor = _tensor_in(chunk)
                if tensor is None:
                    break
                tensors.append(tensor.to(self.dst_device, copy=True))
        finally:
            were_held = self._store.release(chunks)
        return tensors if were_held else []


def _header_of(key: CacheEngineKey, tensor: torch.Tensor) -> RecordHeader:
    """Return the header of the record of a tensor, without its digest.

    Raises:
        ValueError: A record cannot hold a tensor of that dtype or shape.
    """
    header = raw_header(key, tensor.shape, tensor.dtype, UNSEALED_DIGEST)
    try:
        header.check(header.tensors[0].length)
    except RecordError as exc:
        raise ValueError(f"kv_chunk of shape {tuple(tensor.shape)}: {exc}") from exc
    return header


def _tensor_in(chunk: Chunk) -> torch.Tensor | None:
    """Return the one raw tensor of a chunk, sharing its memory; None when it holds anything
    else.
    """
    header = chunk.described
    if header.serde != RAW_SERDE or len(header.tensors) != 1:
        return None
    [spec] = header.tensors
    return tensor_over(chunk.memory.byte_array, spec.shape, spec.dtype)
