"""The interface of the documented serdes: one tensor as bytes, and back. Needs torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from lmcache_core._typing import override
from lmcache_core.memory.dtypes import dtype_name

BytesLike = bytes | bytearray | memoryview
"""Input of the deserializers: contiguous bytes of any owner, only read and not kept."""


class Serializer(ABC):
    """Writes a tensor as bytes that describe it completely: values, shape and dtype. Stateless and
    thread-safe.
    """

    @abstractmethod
    def to_bytes(self, t: torch.Tensor) -> bytes:
        """Encode a tensor.

        Args:
            t: A dense tensor on any device, of any shape and strides, of a dtype of
                `DTYPE_ITEMSIZE`. Only read.

        Returns:
            Its encoding. The caller owns it.

        Raises:
            ValueError: This serde cannot encode such a tensor; the text says what it accepts.
        """


class Deserializer(ABC):
    """Reads the output of the same serde's `Serializer`. Stateless and thread-safe.

    Args:
        dtype: Dtype of the tensors that `from_bytes` returns, a `torch.dtype` or its name; None: as
            stored.

    Raises:
        ValueError: Not a dtype of `DTYPE_ITEMSIZE`.
    """

    def __init__(self, dtype: torch.dtype | str | None) -> None:
        self.dtype: torch.dtype | None = (
            None if dtype is None else getattr(torch, dtype_name(dtype))
        )

    @abstractmethod
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        """Decode a tensor.

        Args:
            bs: All bytes of one encoding, and no more. Only read, and not referenced by the result.

        Returns:
            A contiguous CPU tensor of the stored shape, of this deserializer's dtype. The caller
                owns it and its memory.

        Raises:
            SerdeError: The bytes are not an encoding of this serde, or are damaged. Detecting this
                takes time and memory bounded by the length of `bs`.
        """

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the requested dtype; the same object if it already has that
        dtype.
        """
        return tensor if self.dtype is None else tensor.to(self.dtype)


class PlainDeserializer(Deserializer):
    """A deserializer whose `from_bytes` is `from_bytes_normal` followed by the conversion to the
    requested dtype.
    """

    @override
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        """Decode and convert; takes up to eight times the stored bytes (uint8 to float64)."""
        return self._converted(self.from_bytes_normal(bs))

    @abstractmethod
    def from_bytes_normal(self, b: BytesLike) -> torch.Tensor:
        """Decode without conversion: return the tensor in the stored dtype.

        Raises:
            SerdeError: See `from_bytes`.
        """
