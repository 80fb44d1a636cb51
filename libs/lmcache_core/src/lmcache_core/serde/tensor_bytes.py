"""The container of the tensor serdes: a checked head, then the serde's payload; and the
Fast serde, whose payload is the tensor's bytes. Needs torch.

    magic "LMTB" | version u8 | serde u8 | dtype u8 | dimensions u8 | payload length u64 | one u64
    for each dimension | digest | payload

Integers are little-endian, and so are a tensor's elements. The digest is xxh3-128 of everything
before and after it, 16 bytes. It detects damage; it does not authenticate the writer, so the claims
of a payload with a valid digest are checked as well.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import torch

from lmcache_core._typing import override
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name
from lmcache_core.memory.views import bytes_under, tensor_over
from lmcache_core.record.header import DIGEST_BYTES, payload_hasher
from lmcache_core.serde.base import BytesLike, PlainDeserializer, Serializer

MAGIC = b"LMTB"
VERSION = 1
MAX_DIMENSIONS = 64
"""Limit of torch."""
MAX_CONTAINER_BYTES = 4 << 30
MAX_ENVELOPE_BYTES = 64 << 10
"""Bytes that a serde's own format may add to the bytes of the tensor."""
MAX_EXTENT = 1 << 56
"""Bound on the product of all sizes, with an empty dimension counted as one: torch multiplies them
without checking, even for an empty tensor.
"""

DTYPE_CODES = MappingProxyType(
    {
        "float64": 1,
        "float32": 2,
        "float16": 3,
        "bfloat16": 4,
        "float8_e4m3fn": 5,
        "float8_e5m2": 6,
        "int64": 7,
        "int32": 8,
        "int16": 9,
        "int8": 10,
        "uint8": 11,
        "bool": 12,
    }
)
_DTYPE_NAMES = MappingProxyType({code: name for name, code in DTYPE_CODES.items()})
_PREFIX = struct.Struct("<4sBBBBQ")


class SerdeId(IntEnum):
    """The serde of a payload."""

    TORCH = 1
    SAFETENSOR = 2
    FAST = 3
    CACHEGEN = 4


@dataclass(frozen=True, slots=True)
class TensorHead:
    """The description of a payload.

    Attributes:
        serde: Serde of the payload.
        dtype: Name of the tensor's dtype.
        shape: Its shape.
        payload_bytes: Length of the payload.
    """

    serde: SerdeId
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return math.prod(self.shape) * DTYPE_ITEMSIZE[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype, as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def fault(self) -> str | None:
        """Return which bound is exceeded, None if none is. The payload of `FAST` is the tensor's
        bytes; others may add an envelope.
        """
        if len(self.shape) > MAX_DIMENSIONS:
            return f"{len(self.shape)} dimensions; at most {MAX_DIMENSIONS} can be encoded"
        if math.prod(max(size, 1) for size in self.shape) > MAX_EXTENT:
            return f"shape {self.shape}; the product of its sizes may be at most {MAX_EXTENT}"
        head_bytes = _PREFIX.size + 8 * len(self.shape) + DIGEST_BYTES
        if (
            self.payload_bytes > MAX_CONTAINER_BYTES - head_bytes
            or self.num_bytes > MAX_CONTAINER_BYTES
        ):
            return (
                f"{self.num_bytes} bytes of tensor; at most {MAX_CONTAINER_BYTES} can be encoded,"
                " all counted"
            )
        max_envelope_bytes = 0 if self.serde is SerdeId.FAST else MAX_ENVELOPE_BYTES
        if self.serde is SerdeId.CACHEGEN and self.payload_bytes <= self.num_bytes:
            return None
        if not 0 <= self.payload_bytes - self.num_bytes <= max_envelope_bytes:
            return f"a payload of {self.payload_bytes} bytes for {self.num_bytes} bytes of tensor"
        return None


def dense(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the form that all three serdes write: a plain contiguous CPU tensor with
    exactly its own memory. Copies only if necessary.

    Raises:
        TypeError: Not a tensor.
        ValueError: Its dtype, layout or shape cannot be encoded.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{type(t).__name__} cannot be encoded: give a torch.Tensor")
    dtype = dtype_name(t.dtype)
    if t.layout is not torch.strided or t.is_nested or t.is_meta:
        raise ValueError(
            f"a tensor of layout {t.layout} on {t.device} cannot be encoded: give a dense one that"
            " has values"
        )
    fault = TensorHead(SerdeId.FAST, dtype, tuple(t.shape), t.nbytes).fault()
    if fault is not None:
        raise ValueError(f"a tensor cannot be encoded: {fault}")
    plain = t.detach().as_subclass(torch.Tensor).to("cpu").resolve_neg()
    # An empty view may begin past the end of an empty storage.
    is_whole = plain.storage_offset() == 0 and plain.untyped_storage().nbytes() == plain.nbytes
    if is_whole and plain.stride() == contiguous_strides(plain.shape):
        return plain
    return torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a new tensor of that shape, as torch computes them: an
    empty dimension counts as one.
    """
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def head_of(serde: SerdeId, tensor: torch.Tensor, payload: BytesLike) -> TensorHead:
    """Return the head for a serde's payload of a tensor."""
    return TensorHead(serde, dtype_name(tensor.dtype), tuple(tensor.shape), len(payload))


def seal(head: TensorHead, payload: BytesLike) -> bytes:
    """Put a head in front of its payload.

    Raises:
        ValueError: The payload is longer than a container may be.
    """
    fault = head.fault()
    if fault is not None:
        raise ValueError(f"a tensor cannot be encoded: {fault}")
    prefix = _PREFIX.pack(
        MAGIC, VERSION, head.serde, DTYPE_CODES[head.dtype], len(head.shape), head.payload_bytes
    )
    prefix += struct.pack(f"<{len(head.shape)}Q", *head.shape)
    return b"".join((prefix, _digest(prefix, payload), payload))


def unseal(data: BytesLike, serde: SerdeId) -> tuple[TensorHead, memoryview]:
    """Read and check a head, and its payload against it. Allocates nothing that grows with the
    head's claims.

    Args:
        data: All bytes of one container.
        serde: Serde of the payload requested; another one is refused.

    Returns:
        The head, and the payload: a view of `data`.

    Raises:
        SerdeError: The bytes are not such a container, or are damaged.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("bytes with gaps cannot be decoded: copy them with bytes()")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    if len(view) < _PREFIX.size:
        raise SerdeError(
            f"{len(view)} bytes are too short for an encoded tensor, which begins with"
            f" {_PREFIX.size}"
        )
    magic, version, found, dtype_code, num_dimensions, payload_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise SerdeError(
            f"not an encoded tensor of version {VERSION}: the bytes begin with"
            f" {bytes(view[:5]).hex()}"
        )
    if found != serde:
        raise SerdeError(f"encoded by serde {found}, read as {serde.name} ({serde.value})")
    if dtype_code not in _DTYPE_NAMES or num_dimensions > MAX_DIMENSIONS:
        raise SerdeError(f"dtype {dtype_code} with {num_dimensions} dimensions is not known")
    digest_at = _PREFIX.size + 8 * num_dimensions
    payload_at = digest_at + DIGEST_BYTES
    if len(view) != payload_at + payload_bytes:
        raise SerdeError(f"{len(view)} bytes, {payload_at + payload_bytes} by its head")
    shape = struct.unpack_from(f"<{num_dimensions}Q", view, _PREFIX.size)
    head = TensorHead(serde, _DTYPE_NAMES[dtype_code], shape, payload_bytes)
    fault = head.fault()
    if fault is not None:
        raise SerdeError(f"out of bounds: {fault}")
    payload = view[payload_at:]
    if _digest(view[:digest_at], payload) != bytes(view[digest_at:payload_at]):
        raise SerdeError("damaged: the digest does not match")
    return head, payload


def check_elements(head: TensorHead, elements: memoryview) -> None:
    """Check that the bytes of a tensor are values of its dtype: for a bool only 0 and 1 are, and
    others are undefined behaviour in torch.

    Raises:
        SerdeError: They are not.
    """
    if (
        head.dtype == "bool"
        and len(elements)
        and int(tensor_over(elements, (len(elements),), "uint8").max()) > 1
    ):
        raise SerdeError("a bool that is neither 0 nor 1")


def decoded_tensor(head: TensorHead, elements: memoryview) -> torch.Tensor:
    """Return a new tensor of the head's dtype and shape with these bytes.

    Raises:
        SerdeError: They are not values of that dtype.
    """
    check_elements(head, elements)
    tensor = torch.empty(head.shape, dtype=head.torch_dtype, device="cpu")
    bytes_under(tensor)[:] = elements
    return tensor


class FastSerializer(Serializer):
    """Writes the bytes of the tensor unchanged, with two reads and one copy."""

    @override
    def to_bytes(self, t: torch.Tensor) -> bytes:
        tensor = dense(t)
        payload = bytes_under(tensor)
        return seal(head_of(SerdeId.FAST, tensor, payload), payload)


class FastDeserializer(PlainDeserializer):
    """Reads the output of `FastSerializer`, shape included."""

    @override
    def from_bytes_normal(self, b: BytesLike) -> torch.Tensor:
        return decoded_tensor(*unseal(b, SerdeId.FAST))


def _digest(prefix: BytesLike, payload: BytesLike) -> bytes:
    hasher = payload_hasher()
    hasher.update(prefix)
    hasher.update(payload)
    return hasher.digest()
