"""What the CacheGen coder makes, as objects and as bytes. Needs torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_core.documented.cachegen.container import (
    KIND_CHANNEL_STREAMS,
    KIND_STREAMS,
    check_numbers,
    check_tensor,
    seal,
    unseal,
)
from lmcache_core.errors import SerdeError

logger = logging.getLogger(__name__)

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
        return seal(KIND_STREAMS, (self.num_heads, self.head_size), tensors)

    @classmethod
    def from_bytes(cls, bs: bytes | bytearray | memoryview) -> CacheGenEncoderOutput:
        """Read what `to_bytes` wrote. Tensors are on the CPU and own their memory.

        Raises:
            SerdeError: The bytes are no such output, or are damaged. Found out in time and memory
                bounded by their length.
        """
        numbers, tensors = unseal(bs, KIND_STREAMS)
        if len(numbers) != 2 or len(tensors) != 5:
            raise SerdeError(f"{len(numbers)} numbers and {len(tensors)} tensors, must be 2 and 5")
        check_tensor("bytestream", tensors[0], ("uint8",), (None,))
        output = cls(tensors[0].numpy().tobytes(), *tensors[1:], *numbers)
        output._check()
        return output

    def _check(self) -> None:
        check_tensor(
            "start_indices",
            self.start_indices,
            ("int32", "int64"),
            (None,) * self.start_indices.ndim,
        )
        _check_tables(
            self.cdf, self.max_tensors_key, self.max_tensors_value, (self.num_heads, self.head_size)
        )


@dataclass
class CacheGenGPUBytestream:
    """The streams of some tokens.

    Attributes:
        bytestream: uint8, one-dimensional: one stream for each layer and channel, one behind the
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
        return seal(
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
        numbers, tensors = unseal(bs, KIND_CHANNEL_STREAMS)
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
        tables = {
            "cdf": self.cdf,
            "max_tensors_key": self.max_tensors_key,
            "max_tensors_value": self.max_tensors_value,
        }
        for name, tensor in tables.items():
            logger.debug("%s is on %s", name, tensor.device)
        for i, chunk in enumerate(self.data_chunks):
            logger.debug(
                "data chunk %d: bytestream is on %s, lengths are on %s",
                i,
                chunk.bytestream.device,
                chunk.bytestream_lengths.device,
            )

    def _check(self) -> None:
        _check_tables(
            self.cdf, self.max_tensors_key, self.max_tensors_value, (self.num_heads, self.head_size)
        )
        for i, chunk in enumerate(self.data_chunks):
            check_numbers({f"ntokens of data chunk {i}": chunk.ntokens})
            check_tensor("bytestream", chunk.bytestream, ("uint8",), (None,))
            check_tensor(
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
    cdf: torch.Tensor, max_keys: torch.Tensor, max_values: torch.Tensor, head_shape: Sequence[int]
) -> None:
    check_numbers({"num_heads": head_shape[0], "head_size": head_shape[1]})
    check_tensor("cdf", cdf, ("int16",), (None, head_shape[0] * head_shape[1], None))
    check_tensor("max_tensors_key", max_keys, SCALE_DTYPES, (None, None, 1))
    check_tensor(
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
