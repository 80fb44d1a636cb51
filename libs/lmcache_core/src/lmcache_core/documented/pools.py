"""Pools: one arena, cut into equal slots of one whole chunk. Needs torch."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcache_core._typing import override
from lmcache_core.errors import ConfigError, IntegrityError
from lmcache_core.memory.dtypes import dtype_name, num_bytes
from lmcache_core.memory.tensor import device_arena, host_arena, pin

if TYPE_CHECKING:
    from lmcache_core.config import LMCacheMemPoolMetadata

BYTES_PER_GB = 1 << 30


@dataclass(eq=False)
class KVObj:
    """A slot of a pool, and the part of it that one chunk fills.

    Attributes:
        size: Bytes of the chunk.
        data: A view of the slot's memory in the shape and dtype of the chunk; its content is
            undefined until it is written.
    """

    chunk_idx: int
    size: int
    data: torch.Tensor


class BasePool(ABC):
    """Allocates slots."""

    @abstractmethod
    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        """Return a slot for a chunk of that shape and dtype, without moving data.

        Returns:
            A slot, owned by the caller until `free`; None if the pool is full.

        Raises:
            ValueError: Such a chunk does not fit a slot, whether or not the pool is full.
        """

    @abstractmethod
    def free(self, kv_obj: KVObj) -> None:
        """Free a slot; its `data` must not be used any more.

        Raises:
            IntegrityError: It is already free, or belongs to another pool.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Check the accounting: each slot is free or allocated, once.

        Raises:
            IntegrityError: It does not add up.
        """


class LocalPool(BasePool):
    """Slots in plain host memory, allocated and touched at construction. Thread-safe.

    A chunk may have fewer tokens than a slot has room for, and come in either layout: `[num_layers,
    2, num_tokens, num_kv_heads, head_size]` (vllm) or `[num_layers, 2, num_kv_heads, num_tokens,
    head_size]` (huggingface). Its view is contiguous at the slot's start.

    Args:
        metadata: `kv_shape` of a whole chunk, `(num_layers, 2, chunk_size, num_kv_heads,
            head_size)`; `kv_dtype`; and `max_local_cache_size`, GB (2^30 bytes), which the slots
            never exceed.

    Raises:
        ConfigError: The size does not hold one chunk, or the shape has not five positive
            dimensions.
        CapacityError: The machine does not have that much memory.
    """

    def __init__(self, metadata: LMCacheMemPoolMetadata) -> None:
        self._kv_shape = tuple(metadata.kv_shape)
        if len(self._kv_shape) != 5 or min(self._kv_shape) < 1:
            raise ConfigError(
                f"kv_shape={self._kv_shape}: must be (num_layers, 2, chunk_size, num_kv_heads,"
                " head_size)"
            )
        self._dtype: torch.dtype = getattr(torch, dtype_name(metadata.kv_dtype))
        chunk_bytes = num_bytes(self._kv_shape, self._dtype)
        self.max_chunk_num = self.init_max_chunk_num(metadata)
        if self.max_chunk_num < 1:
            raise ConfigError(
                f"max_local_cache_size={metadata.max_local_cache_size} GB holds no chunk of"
                f" {chunk_bytes / BYTES_PER_GB:.4f} GB: enlarge it"
            )
        self._arena = self._make_arena(self.max_chunk_num * chunk_bytes)
        self._slots = self._arena.view(self.max_chunk_num, chunk_bytes).view(self._dtype)
        self._lock = threading.Lock()
        self._free = list(range(self.max_chunk_num - 1, -1, -1))
        self._handed_out: dict[int, KVObj] = {}

    def init_max_chunk_num(self, metadata: LMCacheMemPoolMetadata) -> int:
        """Return how many whole chunks fit into `max_local_cache_size`."""
        return int(metadata.max_local_cache_size * BYTES_PER_GB) // num_bytes(
            metadata.kv_shape, metadata.kv_dtype
        )

    @override
    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        self._require_fits(kv_chunk)
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()
            data = self._slots[index, : kv_chunk.numel()].view(kv_chunk.shape)
            kv_obj = self._handed_out[index] = KVObj(index, data.nbytes, data)
        return kv_obj

    @override
    def free(self, kv_obj: KVObj) -> None:
        with self._lock:
            if self._handed_out.get(kv_obj.chunk_idx) is not kv_obj:
                raise IntegrityError(
                    f"slot {kv_obj.chunk_idx} is free already, or was handed out by another pool"
                )
            del self._handed_out[kv_obj.chunk_idx]
            self._free.append(kv_obj.chunk_idx)

    @override
    def check_integrity(self) -> None:
        with self._lock:
            if sorted([*self._free, *self._handed_out]) != list(range(self.max_chunk_num)):
                raise IntegrityError(
                    f"{len(self._free)} slots are free and {len(self._handed_out)} handed out, of"
                    f" {self.max_chunk_num}"
                )

    def _make_arena(self, size: int) -> torch.Tensor:
        """Return uint8 `[size]`, touched."""
        return host_arena(size)

    def _require_fits(self, kv_chunk: torch.Tensor) -> None:
        if kv_chunk.dtype != self._dtype:
            raise ValueError(
                f"a chunk of dtype {kv_chunk.dtype} does not fit a pool of {self._dtype}"
            )
        layers, pair, tokens, heads, head_size = self._kv_shape
        shape = tuple(kv_chunk.shape)
        fits = (
            len(shape) == 5
            and (shape[0], shape[1], shape[4]) == (layers, pair, head_size)
            and kv_chunk.numel() <= math.prod(self._kv_shape)
        )
        if not fits or heads not in shape[2:4]:
            raise ValueError(
                f"a chunk of shape {shape} does not fit a pool of chunks {self._kv_shape}: at most"
                f" {tokens} tokens, as {layers, pair, 'tokens', heads, head_size} or"
                f" {layers, pair, heads, 'tokens', head_size}"
            )


class LocalCPUPool(LocalPool):
    """Slots in host memory, pinned if CUDA is available."""

    def _make_arena(self, size: int) -> torch.Tensor:
        arena = host_arena(size)
        pin(arena, self)
        return arena


class LocalCPUBufferPool(LocalCPUPool):
    """Slots in host memory for staging chunks: callers expect it to be full at times, and retry."""


class LocalGPUPool(LocalPool):
    """Slots on the current CUDA device.

    Raises:
        ConfigError: There is none; or as `LocalPool` raises.
    """

    def _make_arena(self, size: int) -> torch.Tensor:
        return device_arena(size, "cuda")
