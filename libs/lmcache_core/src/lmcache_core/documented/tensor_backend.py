"""The documented interface of a backend of plain tensors, one key each. Needs torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from lmcache_core.keys import CacheEngineKey


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
