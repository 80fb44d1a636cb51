"""The container of CacheGen outputs: a checked head, then tensors one after the other. Needs
torch.

    magic "LMCG" | version u8 | 3 zeros | head length u32 | zeros u32 | payload length u64 | digest
    | head | payload

Integers are little-endian, and so are the elements of tensors. The digest is xxh3-128 of all that
is before and after it, 16 bytes. The head is MessagePack. The digest tells damage from whole
bytes, not who wrote them: what a head claims under a right one is checked too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch

from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name
from lmcache_core.record.header import DIGEST_BYTES, payload_hasher

MAGIC = b"LMCG"
VERSION = 1
MAX_DATA_CHUNKS = 8192
MAX_TENSORS = 3 + 2 * MAX_DATA_CHUNKS
MAX_NUMBERS = 2 + MAX_DATA_CHUNKS
MAX_HEAD_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 4 << 30
MAX_DIMENSIONS = 4
MAX_EXTENT = 1 << 40
"""Bound of the product of all sizes, an empty dimension counted as one."""

KIND_STREAMS = "streams"
KIND_CHANNEL_STREAMS = "channel_streams"

_PREFIX = struct.Struct("<4sB3xI4xQ")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class PackedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the payload.

    Attributes:
        dtype: Its name.
        shape: Its shape.
    """

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]

    @property
    def num_bytes(self) -> int:
        """Its bytes, at most eight times `MAX_EXTENT`.

        Raises:
            SerdeError: The dtype is not known or the shape out of bounds.
        """
        if self.dtype not in DTYPE_ITEMSIZE or self.dtype == "bool":
            raise SerdeError(f"dtype {self.dtype!r} is not known")
        if (
            len(self.shape) > MAX_DIMENSIONS
            or math.prod(max(size, 1) for size in self.shape) > MAX_EXTENT
        ):
            raise SerdeError(
                f"shape {self.shape}: at most {MAX_DIMENSIONS} sizes, with a product of at most"
                f" {MAX_EXTENT}, can be written"
            )
        return math.prod(self.shape) * DTYPE_ITEMSIZE[self.dtype]


class PackedHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the payload is.

    Attributes:
        kind: Which output: `KIND_STREAMS` or `KIND_CHANNEL_STREAMS`.
        numbers: Its whole numbers, in the order of its fields.
        tensors: Its tensors, in the order of its fields and of the payload.
    """

    kind: Annotated[str, msgspec.Meta(max_length=32)]
    numbers: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_NUMBERS)]
    tensors: Annotated[tuple[PackedTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]


def seal(kind: str, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> bytes:
    """Write a container; tensors may be on any device.

    Raises:
        SerdeError: More, or larger, than a container may hold.
    """
    if len(tensors) > MAX_TENSORS or len(numbers) > MAX_NUMBERS:
        raise SerdeError(
            f"{len(tensors)} tensors and {len(numbers)} numbers: at most {MAX_TENSORS} and"
            f" {MAX_NUMBERS} can be written"
        )
    heads = tuple(PackedTensor(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
    payload_bytes = sum(head.num_bytes for head in heads)
    head = msgspec.msgpack.encode(PackedHead(kind, tuple(numbers), heads))
    if payload_bytes > MAX_PAYLOAD_BYTES or len(head) > MAX_HEAD_BYTES:
        raise SerdeError(
            f"{payload_bytes} bytes of tensors, {len(head)} of head: at most {MAX_PAYLOAD_BYTES}"
            f" and {MAX_HEAD_BYTES}"
        )
    prefix = _PREFIX.pack(MAGIC, VERSION, len(head), payload_bytes)
    payload = [
        tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        for tensor in tensors
    ]
    return b"".join((prefix, _digest((prefix, head, *payload)), head, *payload))


def unseal(
    data: bytes | bytearray | memoryview, kind: str
) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:
    """Read a container. Every length is checked against the bytes that are there before anything is
    allocated for it.

    Args:
        data: All bytes of it, and no more.
        kind: What is asked for; another one is refused.

    Returns:
        Its numbers, and its tensors: contiguous, on the CPU, with memory of their own.

    Raises:
        SerdeError: The bytes are no such container, or are damaged.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise SerdeError("bytes with gaps cannot be read: copy them with bytes()")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    head, payload = _checked_parts(view)
    try:
        described = msgspec.msgpack.decode(head, type=PackedHead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SerdeError(f"the head of a CacheGen output cannot be read: {exc}") from exc
    if described.kind != kind:
        raise SerdeError(f"a CacheGen output of kind {described.kind!r}, asked for {kind!r}")
    if sum(tensor.num_bytes for tensor in described.tensors) != len(payload):
        raise SerdeError(f"tensors do not add up to the {len(payload)} bytes that are there")
    tensors = []
    offset = 0
    for tensor in described.tensors:
        tensors.append(_owned_tensor(tensor, payload[offset : offset + tensor.num_bytes]))
        offset += tensor.num_bytes
    return described.numbers, tuple(tensors)


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: Sequence[str], shape: Sequence[int | None]
) -> None:
    """Compare a tensor of an output with what it has to be; None stands for any size.

    Raises:
        SerdeError: It is something else.
    """
    fits = len(shape) == tensor.ndim and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if str(tensor.dtype).removeprefix("torch.") not in dtypes or not fits:
        wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise SerdeError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, must be {' or '.join(dtypes)}"
            f" [{wanted_shape}]"
        )


def check_numbers(numbers: Mapping[str, int]) -> None:
    """Check that whole numbers of an output can be written.

    Raises:
        SerdeError: One is negative or beyond all use.
    """
    for name, number in numbers.items():
        if not (isinstance(number, int) and 0 <= number <= MAX_EXTENT):
            raise SerdeError(f"{name} {number!r} must be a whole number, 0 to {MAX_EXTENT}")


def _checked_parts(view: memoryview) -> tuple[memoryview, memoryview]:
    if len(view) < _PREFIX.size:
        raise SerdeError(
            f"{len(view)} bytes are too short for a CacheGen output, which begins with"
            f" {_PREFIX.size}"
        )
    magic, version, head_bytes, payload_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise SerdeError(
            f"not a CacheGen output of version {VERSION}: the bytes begin with"
            f" {bytes(view[:5]).hex()}"
        )
    if (
        view[: _PREFIX.size] != _PREFIX.pack(magic, version, head_bytes, payload_bytes)
        or head_bytes > MAX_HEAD_BYTES
    ):
        raise SerdeError(f"a head of {head_bytes} bytes, or what must be zero is not")
    head_at = _PREFIX.size + DIGEST_BYTES
    if payload_bytes > MAX_PAYLOAD_BYTES or len(view) != head_at + head_bytes + payload_bytes:
        raise SerdeError(f"{len(view)} bytes, {head_at + head_bytes + payload_bytes} by its head")
    if _digest((view[: _PREFIX.size], view[head_at:])) != view[_PREFIX.size : head_at]:
        raise SerdeError("damaged: the digest does not match")
    return view[head_at : head_at + head_bytes], view[head_at + head_bytes :]


def _owned_tensor(head: PackedTensor, elements: memoryview) -> torch.Tensor:
    owned = torch.empty(len(elements), dtype=torch.uint8)
    owned.numpy()[:] = np.frombuffer(elements, dtype=np.uint8)
    dtype: torch.dtype = getattr(torch, head.dtype)
    return owned.view(dtype).reshape(head.shape)


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    hasher = payload_hasher()
    for part in parts:
        hasher.update(part)
    return hasher.digest()
