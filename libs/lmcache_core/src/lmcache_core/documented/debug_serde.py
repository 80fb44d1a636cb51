"""Serdes that log what they do."""

from __future__ import annotations

import logging
import time

import torch

from lmcache_core._typing import override
from lmcache_core.serde.base import BytesLike, Deserializer, Serializer

logger = logging.getLogger(__name__)


class SerializerDebugWrapper(Serializer):
    """Forwards to a serializer and writes one debug line a call.

    Args:
        s: What is wrapped.
    """

    def __init__(self, s: Serializer) -> None:
        self._wrapped = s

    @override
    def to_bytes(self, t: torch.Tensor) -> bytes:
        begin = time.perf_counter()
        encoded = self._wrapped.to_bytes(t)
        _log("encoded", self._wrapped, t, len(encoded), begin)
        return encoded


class DeserializerDebugWrapper(Deserializer):
    """Forwards to a deserializer and writes one debug line a call.

    Args:
        d: What is wrapped.
    """

    def __init__(self, d: Deserializer) -> None:
        super().__init__(d.dtype)
        self._wrapped = d

    @override
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        begin = time.perf_counter()
        tensor = self._wrapped.from_bytes(bs)
        _log("decoded", self._wrapped, tensor, memoryview(bs).nbytes, begin)
        return tensor


def _log(done: str, serde: object, tensor: torch.Tensor, num_bytes: int, begin: float) -> None:
    logger.debug(
        "%s: serde=%s dtype=%s shape=%s bytes=%d took_ms=%.3f",
        done,
        type(serde).__name__,
        tensor.dtype,
        tuple(tensor.shape),
        num_bytes,
        (time.perf_counter() - begin) * 1e3,
    )
