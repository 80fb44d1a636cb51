"""What the CacheGen coder makes, as objects and as bytes. Needs torch.

The bytes are a container: a checked head, then tensors one after the other.

    magic "LMCG" | version u8 | 3 zeros | head length u32 | zeros u32 | payload length u64 | digest
    | head | payload

Integers are little-endian, and so are the elements of tensors. The digest is xxh3-128 of all that
is before and after it, 16 bytes. The head is MessagePack. The digest tells damage from whole
bytes, not who wrote them: what a head claims under a right digest is checked too.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch

from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name
from lmcache_core.record.header import DIGEST_BYTES, payload_hasher

logger = logging.getLogger(__name__)

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
SCALE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass
class CacheGenEncoderOutput:
    """The older output, made on the CPU: one stream for each layer and token.

    Attributes:
        bytestream: All streams, one after the other.
        start_indices: Where each begins: int32 or int64, any shape.
        cdf: int16 with the bits of uint16, `[nlayers (of keys and values), nchannels, bins + 1]`.
        max_tensors_key: Largest magnitudes of the keys, `[nlayers, ntokens, 1]`.
        max_tensors_value: Largest magnitudes of the values, likewise.
        num_heads: Heads of the keys or values of a layer.
        head_size: Channels of a head.
    """

    bytestream: bytes
    start_indices: torch.Tensor
    cdf: torch.Tensor
    max_tensors_key: torch.Tensor
    max_tensors_value: torch.Tensor
    num_heads: int
    head_size: int

    def to_bytes(self) -> bytes:
        """Return everything as one checked container; the caller owns it.

        Raises:
            SerdeError: A field is not what the class says.
        """
        self._check()
        stream = (
            torch.frombuffer(bytearray(self.bytestream), dtype=torch.uint8)
            if self.bytestream
            else torch.empty(0, dtype=torch.uint8)
        )
        tensors = (
            stream,
            self.start_indices,
            self.cdf,
            self.max_tensors_key,
            self.max_tensors_value,
        )
        return _seal(KIND_STREAMS, (self.num_heads, self.head_size), tensors)

    @classmethod
    def from_bytes(cls, bs: bytes | bytearray | memoryview) -> CacheGenEncoderOutput:
        """Read what `to_bytes` wrote. Tensors are on the CPU and own their memory.

        Raises:
            SerdeError: The bytes are no such output, or are damaged. Found out in time and memory
                bounded by their length.
        """
        numbers, tensors = _unseal(bs, KIND_STREAMS)
        if len(numbers) != 2 or len(tensors) != 5:
            raise SerdeError(f"{len(numbers)} numbers and {len(tensors)} tensors, must be 2 and 5")
        _check_tensor("bytestream", tensors[0], ("uint8",), (None,))
        output = cls(tensors[0].numpy().tobytes(), *tensors[1:], *numbers)
        output._check()
        return output

    def _check(self) -> None:
        _check_tensor(
            "start_indices",
            self.start_indices,
            ("int32", "int64"),
            (None,) * self.start_indices.ndim,
        )
        _check_tables(
            self.cdf, self.max_tensors_key, self.max_tensors_value, self.num_heads, self.head_size
        )


@dataclass
class CacheGenGPUBytestream:
    """The streams of some tokens.

    Attributes:
        bytestream: uint8, one-dimensional: one stream for each layer and channel, one after the
            other.
        bytestream_lengths: Their lengths: int32, `[nlayers (of keys and values), nchannels]`.
        ntokens: How many tokens.
    """

    bytestream: torch.Tensor
    bytestream_lengths: torch.Tensor
    ntokens: int


@dataclass
class CacheGenGPUEncoderOutput:
    """What `encode_function` makes of KV: streams for each layer and channel.

    Attributes:
        data_chunks: The streams, in the order of the tokens.
        cdf: Distribution of each channel: int16 with the bits of uint16, `[2 * nlayers, nchannels,
            bins + 1]`.
        max_tensors_key: Largest magnitudes of the keys, `[nlayers, ntokens, 1]`.
        max_tensors_value: Largest magnitudes of the values, likewise.
        num_heads: Heads of the keys or values of a layer.
        head_size: Channels of a head.
    """

    data_chunks: list[CacheGenGPUBytestream]
    cdf: torch.Tensor
    max_tensors_key: torch.Tensor
    max_tensors_value: torch.Tensor
    num_heads: int
    head_size: int

    def to_bytes(self) -> bytes:
        """Return everything as one checked container; the caller owns it. Tensors are copied to the
        CPU if they are elsewhere.

        Raises:
            SerdeError: A field is not what the class says, or does not fit the others.
        """
        self._check()
        numbers = (self.num_heads, self.head_size, *[chunk.ntokens for chunk in self.data_chunks])
        streams = [
            tensor
            for chunk in self.data_chunks
            for tensor in (chunk.bytestream, chunk.bytestream_lengths)
        ]
        return _seal(
            KIND_CHANNEL_STREAMS,
            numbers,
            (self.cdf, self.max_tensors_key, self.max_tensors_value, *streams),
        )

    @classmethod
    def from_bytes(cls, bs: bytes | bytearray | memoryview) -> CacheGenGPUEncoderOutput:
        """Read what `to_bytes` wrote. Tensors are on the CPU and own their memory.

        Raises:
            SerdeError: The bytes are no such output, or are damaged. Found out in time and memory
                bounded by their length.
        """
        numbers, tensors = _unseal(bs, KIND_CHANNEL_STREAMS)
        num_chunks = len(numbers) - 2
        if num_chunks < 0 or len(tensors) != 3 + 2 * num_chunks:
            raise SerdeError(
                f"{len(numbers)} numbers and {len(tensors)} tensors, must be 2 and 3, and 1 and 2"
                " more for each data chunk"
            )
        chunks = [
            CacheGenGPUBytestream(tensors[3 + 2 * i], tensors[4 + 2 * i], numbers[2 + i])
            for i in range(num_chunks)
        ]
        output = cls(chunks, tensors[0], tensors[1], tensors[2], numbers[0], numbers[1])
        output._check()
        return output

    def debug_print_device(self) -> None:
        """Log on which device each tensor is."""
        for name in ("cdf", "max_tensors_key", "max_tensors_value"):
            logger.debug("tensor: name=%s device=%s", name, getattr(self, name).device)
        for i, chunk in enumerate(self.data_chunks):
            logger.debug(
                "data chunk: index=%d bytestream_device=%s lengths_device=%s",
                i,
                chunk.bytestream.device,
                chunk.bytestream_lengths.device,
            )

    def _check(self) -> None:
        _check_tables(
            self.cdf, self.max_tensors_key, self.max_tensors_value, self.num_heads, self.head_size
        )
        for i, chunk in enumerate(self.data_chunks):
            _check_count(f"ntokens of data chunk {i}", chunk.ntokens)
            _check_tensor("bytestream", chunk.bytestream, ("uint8",), (None,))
            _check_tensor(
                "bytestream_lengths",
                chunk.bytestream_lengths,
                ("int32",),
                tuple(self.cdf.shape[:2]),
            )
        num_tokens = sum(chunk.ntokens for chunk in self.data_chunks)
        if num_tokens != self.max_tensors_key.shape[1]:
            raise SerdeError(
                f"data chunks of {num_tokens} tokens with largest magnitudes of"
                f" {self.max_tensors_key.shape[1]}"
            )


def _check_tables(
    cdf: torch.Tensor,
    max_keys: torch.Tensor,
    max_values: torch.Tensor,
    num_heads: int,
    head_size: int,
) -> None:
    _check_count("num_heads", num_heads)
    _check_count("head_size", head_size)
    _check_tensor("cdf", cdf, ("int16",), (None, num_heads * head_size, None))
    _check_tensor("max_tensors_key", max_keys, SCALE_DTYPES, (None, None, 1))
    _check_tensor(
        "max_tensors_value",
        max_values,
        (str(max_keys.dtype).removeprefix("torch."),),
        tuple(max_keys.shape),
    )
    if cdf.shape[0] != 2 * max_keys.shape[0]:
        raise SerdeError(
            f"a cdf of {cdf.shape[0]} layers, largest magnitudes of {max_keys.shape[0]}: must be"
            " two for each"
        )


class _PackedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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


class _PackedHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the payload is.

    Attributes:
        kind: Which output: `KIND_STREAMS` or `KIND_CHANNEL_STREAMS`.
        numbers: Its whole numbers, in the order of its fields.
        tensors: Its tensors, in the order of its fields and of the payload.
    """

    kind: Annotated[str, msgspec.Meta(max_length=32)]
    numbers: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_NUMBERS)]
    tensors: Annotated[tuple[_PackedTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]


def _seal(kind: str, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> bytes:
    """Write a container; tensors may be on any device.

    Raises:
        SerdeError: More, or larger, than a container may hold.
    """
    if len(tensors) > MAX_TENSORS or len(numbers) > MAX_NUMBERS:
        raise SerdeError(
            f"{len(tensors)} tensors and {len(numbers)} numbers: at most {MAX_TENSORS} and"
            f" {MAX_NUMBERS} can be written"
        )
    heads = tuple(
        _PackedTensor(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors
    )
    payload_bytes = sum(head.num_bytes for head in heads)
    head = msgspec.msgpack.encode(_PackedHead(kind, tuple(numbers), heads))
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


def _unseal(
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
        described = msgspec.msgpack.decode(head, type=_PackedHead)
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


def _check_tensor(
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


def _check_count(name: str, number: int) -> None:
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


def _owned_tensor(head: _PackedTensor, elements: memoryview) -> torch.Tensor:
    owned = torch.empty(len(elements), dtype=torch.uint8)
    owned.numpy()[:] = np.frombuffer(elements, dtype=np.uint8)
    dtype: torch.dtype = getattr(torch, head.dtype)
    return owned.view(dtype).reshape(head.shape)


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    hasher = payload_hasher()
    for part in parts:
        hasher.update(part)
    return hasher.digest()
