"""Serdes whose work can be read in the log."""

from __future__ import annotations

import logging
import time

import torch

from lmcache_core._typing import override
from lmcache_core.serde.base import BytesLike, Deserializer, Serializer

logger = logging.getLogger(__name__)


class SerializerDebugWrapper(Serializer):
    """Forwards to a serializer and writes one debug line a call: dtype, shape, bytes, milliseconds.

    Args:
        s: What is wrapped.
    """

    def __init__(self, s: Serializer) -> None:
        self._wrapped = s

    @override
    def to_bytes(self, t: torch.Tensor) -> bytes:
        begin = time.perf_counter()
        encoded = self._wrapped.to_bytes(t)
        name, shape = type(self._wrapped).__name__, tuple(t.shape)
        logger.debug(
            "%s: %s %s as %d bytes in %.3f ms",
            name,
            t.dtype,
            shape,
            len(encoded),
            _milliseconds_since(begin),
        )
        return encoded


class DeserializerDebugWrapper(Deserializer):
    """Forwards to a deserializer and writes one debug line a call: bytes, dtype, shape,
    milliseconds.

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
        num_bytes = memoryview(bs).nbytes
        name, shape = type(self._wrapped).__name__, tuple(tensor.shape)
        logger.debug(
            "%s: %d bytes as %s %s in %.3f ms",
            name,
            num_bytes,
            tensor.dtype,
            shape,
            _milliseconds_since(begin),
        )
        return tensor


def _milliseconds_since(begin: float) -> float:
    return (time.perf_counter() - begin) * 1e3
