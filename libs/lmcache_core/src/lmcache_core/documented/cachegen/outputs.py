"""What the CacheGen coder makes, as objects and as bytes. Needs torch.

The bytes are a message of numbers and tensors (MessagePack), each tensor as the Fast serde writes
it, and the message as the Fast serde writes a tensor of bytes: one digest over everything.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import torch

from lmcache_core.errors import LMCacheError, SerdeError
from lmcache_core.serde.base import BytesLike
from lmcache_core.serde.tensor_bytes import FastDeserializer, FastSerializer, SerdeId, unseal

logger = logging.getLogger(__name__)

MAX_DATA_CHUNKS = 8192
MAX_COUNT = 1 << 40
SCALE_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the bytes of an output hold.

    Attributes:
        kind: Which output: its `KIND`.
        numbers: Its whole numbers, in the order of its fields.
        tensors: Its tensors, in the order of its fields, each by the Fast serde.
    """

    kind: Annotated[str, msgspec.Meta(max_length=32)]
    numbers: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=2 + MAX_DATA_CHUNKS)]
    tensors: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=3 + 2 * MAX_DATA_CHUNKS)]


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

    KIND: ClassVar = "streams"

    bytestream: bytes
    start_indices: torch.Tensor
    cdf: torch.Tensor
    max_tensors_key: torch.Tensor
    max_tensors_value: torch.Tensor
    num_heads: int
    head_size: int

    def to_bytes(self) -> bytes:
        """Return everything as one checked message; the caller owns it.

        Raises:
            SerdeError: A field is not what the class says.
        """
        self._check()
        stream = torch.from_numpy(np.frombuffer(self.bytestream, np.uint8).copy())
        tables = (self.start_indices, self.cdf, self.max_tensors_key, self.max_tensors_value)
        return _seal(self.KIND, (self.num_heads, self.head_size), (stream, *tables))

    @classmethod
    def from_bytes(cls, bs: BytesLike) -> CacheGenEncoderOutput:
        """Read what `to_bytes` wrote. Tensors are on the CPU and own their memory.

        Raises:
            SerdeError: The bytes are no such output, or are damaged. Found out in time and memory
                bounded by their length.
        """
        numbers, tensors = _unseal(bs, cls.KIND)
        if len(numbers) != 2 or len(tensors) != 5:
            raise SerdeError(f"{len(numbers)} numbers and {len(tensors)} tensors, must be 2 and 5")
        stream, starts, cdf, keys, values = tensors
        check_tensor("bytestream", stream, (torch.uint8,), (None,))
        output = cls(stream.numpy().tobytes(), starts, cdf, keys, values, numbers[0], numbers[1])
        output._check()
        return output

    def _check(self) -> None:
        any_shape = (None,) * self.start_indices.ndim
        check_tensor("start_indices", self.start_indices, (torch.int32, torch.int64), any_shape)
        _check_tables(self)


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

    KIND: ClassVar = "channel_streams"

    data_chunks: list[CacheGenGPUBytestream]
    cdf: torch.Tensor
    max_tensors_key: torch.Tensor
    max_tensors_value: torch.Tensor
    num_heads: int
    head_size: int

    def to_bytes(self) -> bytes:
        """Return everything as one checked message; the caller owns it. Tensors are copied to the
        CPU if they are elsewhere.

        Raises:
            SerdeError: A field is not what the class says, or does not fit the others.
        """
        self._check()
        chunks = self.data_chunks
        numbers = (self.num_heads, self.head_size, *(chunk.ntokens for chunk in chunks))
        tensors = [self.cdf, self.max_tensors_key, self.max_tensors_value]
        for chunk in chunks:
            tensors += [chunk.bytestream, chunk.bytestream_lengths]
        return _seal(self.KIND, numbers, tensors)

    @classmethod
    def from_bytes(cls, bs: BytesLike) -> CacheGenGPUEncoderOutput:
        """Read what `to_bytes` wrote. Tensors are on the CPU and own their memory.

        Raises:
            SerdeError: The bytes are no such output, or are damaged. Found out in time and memory
                bounded by their length.
        """
        numbers, tensors = _unseal(bs, cls.KIND)
        num_chunks = len(numbers) - 2
        if num_chunks < 0 or len(tensors) != 3 + 2 * num_chunks:
            raise SerdeError(
                f"{len(numbers)} numbers and {len(tensors)} tensors, must be 2 and 3, and 1 and 2"
                " more for each data chunk"
            )
        num_heads, head_size, *counts = numbers
        cdf, keys, values, *streams = tensors
        of_chunks = zip(streams[::2], streams[1::2], counts, strict=True)
        chunks = [CacheGenGPUBytestream(*of_chunk) for of_chunk in of_chunks]
        output = cls(chunks, cdf, keys, values, num_heads, head_size)
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
        _check_tables(self)
        if len(self.data_chunks) > MAX_DATA_CHUNKS:
            raise SerdeError(f"{len(self.data_chunks)} data chunks; at most {MAX_DATA_CHUNKS}")
        sizes = tuple(self.cdf.shape[:2])
        for i, chunk in enumerate(self.data_chunks):
            _check_count(f"ntokens of data chunk {i}", chunk.ntokens)
            check_tensor("bytestream", chunk.bytestream, (torch.uint8,), (None,))
            check_tensor("bytestream_lengths", chunk.bytestream_lengths, (torch.int32,), sizes)
        num_tokens = sum(chunk.ntokens for chunk in self.data_chunks)
        if num_tokens != self.max_tensors_key.shape[1]:
            raise SerdeError(
                f"data chunks of {num_tokens} tokens with largest magnitudes of"
                f" {self.max_tensors_key.shape[1]}"
            )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    error: type[LMCacheError] = SerdeError,
) -> None:
    """Compare a tensor with what it has to be; None stands for any size.

    Raises:
        LMCacheError: It is something else; of the type `error`.
    """
    fits = len(shape) == tensor.ndim and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise error(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}: give {' or '.join(map(str, dtypes))}"
            f" [{sizes}]"
        )


def _check_tables(output: CacheGenEncoderOutput | CacheGenGPUEncoderOutput) -> None:
    _check_count("num_heads", output.num_heads)
    _check_count("head_size", output.head_size)
    num_channels = output.num_heads * output.head_size
    keys, values = output.max_tensors_key, output.max_tensors_value
    check_tensor("cdf", output.cdf, (torch.int16,), (None, num_channels, None))
    check_tensor("max_tensors_key", keys, SCALE_DTYPES, (None, None, 1))
    check_tensor("max_tensors_value", values, (keys.dtype,), tuple(keys.shape))
    if output.cdf.shape[0] != 2 * keys.shape[0]:
        raise SerdeError(
            f"a cdf of {output.cdf.shape[0]} layers, largest magnitudes of {keys.shape[0]}: must be"
            " two for each"
        )


def _check_count(name: str, number: int) -> None:
    if not (isinstance(number, int) and 0 <= number <= MAX_COUNT):
        raise SerdeError(f"{name} {number!r} must be a whole number, 0 to {MAX_COUNT}")


def _seal(kind: str, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> bytes:
    """Write a message; tensors may be on any device.

    Raises:
        SerdeError: It is longer than a container may be.
    """
    serializer = FastSerializer()
    try:
        packed = tuple(serializer.to_bytes(tensor) for tensor in tensors)
        message = bytearray(msgspec.msgpack.encode(_Message(kind, tuple(numbers), packed)))
        return serializer.to_bytes(torch.frombuffer(message, dtype=torch.uint8))
    except ValueError as exc:
        raise SerdeError(f"a CacheGen output cannot be written: {exc}") from exc


def _unseal(data: BytesLike, kind: str) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Read a message.

    Args:
        data: All bytes of it, and no more.
        kind: What is asked for; another one is refused.

    Returns:
        Its numbers, and its tensors: contiguous, on the CPU, with memory of their own.

    Raises:
        SerdeError: The bytes are no such message, or are damaged.
    """
    _, body = unseal(data, SerdeId.FAST)
    try:
        message = msgspec.msgpack.decode(body, type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SerdeError(f"a CacheGen output cannot be read: {exc}") from exc
    if message.kind != kind:
        raise SerdeError(f"a CacheGen output of kind {message.kind!r}, asked for {kind!r}")
    deserializer = FastDeserializer(None)
    return message.numbers, [deserializer.from_bytes(packed) for packed in message.tensors]
