"""What the CacheGen coder makes, as objects and as bytes. Needs torch and safetensors.

The bytes are a safetensors file of the object's tensors and, as `numbers`, its whole numbers, under
one digest (`serdes.seal`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import safetensors.torch
import torch

from lmcache_core.documented.serdes import BytesLike, dense, seal, unseal
from lmcache_core.errors import LMCacheError, SerdeError

logger = logging.getLogger(__name__)

SCALE_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
MAX_COUNT = 1 << 40


@dataclass
class CacheGenEncoderOutput:
    """The older output, made on the CPU: one stream for each layer and token.

    Attributes:
        bytestream: All streams, one after the other.
        start_indices: Where each begins: int32 or int64, any shape.
        cdf: int16 with the bits of uint16, `[nlayers (of keys and values), nchannels, bins + 1]`.
        max_tensors_key: Largest magnitudes of the keys, `[nlayers, ntokens, 1]`.
        max_tensors_value: Largest magnitudes of the values, likewise.
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
        """Return everything as one checked file; the caller owns it.

        Raises:
            SerdeError: A field is not what the class says.
        """
        self._check()
        stream = torch.from_numpy(np.frombuffer(self.bytestream, np.uint8).copy())
        tensors = _tables(self) | {"bytestream": stream, "start_indices": self.start_indices}
        return _sealed("cachegen_encoder", (self.num_heads, self.head_size), tensors)

    @classmethod
    def from_bytes(cls, bs: BytesLike) -> CacheGenEncoderOutput:
        """Read what `to_bytes` wrote. Tensors are on the CPU and own their memory.

        Raises:
            SerdeError: The bytes are no such output, or are damaged. Found out in time and memory
                bounded by their length.
        """
        numbers, tensors = _unsealed(bs, "cachegen_encoder")
        try:
            (num_heads, head_size), stream = numbers, tensors.pop("bytestream")
            output = cls(
                stream.numpy().tobytes(), **tensors, num_heads=num_heads, head_size=head_size
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise SerdeError(f"not the fields of a CacheGen output: {exc}") from exc
        check_tensor("bytestream", stream, (torch.uint8,), (None,))
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
        """Return everything as one checked file; the caller owns it. Tensors are copied to the CPU
        if they are elsewhere.

        Raises:
            SerdeError: A field is not what the class says, or does not fit the others.
        """
        self._check()
        numbers, tensors = [self.num_heads, self.head_size], _tables(self)
        for i, chunk in enumerate(self.data_chunks):
            numbers.append(chunk.ntokens)
            tensors |= {
                f"bytestream.{i}": chunk.bytestream,
                f"lengths.{i}": chunk.bytestream_lengths,
            }
        return _sealed("cachegen_gpu", numbers, tensors)

    @classmethod
    def from_bytes(cls, bs: BytesLike) -> CacheGenGPUEncoderOutput:
        """Read what `to_bytes` wrote. Tensors are on the CPU and own their memory.

        Raises:
            SerdeError: The bytes are no such output, or are damaged. Found out in time and memory
                bounded by their length.
        """
        numbers, tensors = _unsealed(bs, "cachegen_gpu")
        try:
            num_heads, head_size, *counts = numbers
            chunks = [
                CacheGenGPUBytestream(
                    tensors.pop(f"bytestream.{i}"), tensors.pop(f"lengths.{i}"), count
                )
                for i, count in enumerate(counts)
            ]
            output = cls(chunks, **tensors, num_heads=num_heads, head_size=head_size)
        except (KeyError, TypeError, ValueError) as exc:
            raise SerdeError(f"not the fields of a CacheGen output: {exc}") from exc
        output._check()
        return output

    def debug_print_device(self) -> None:
        """Log on which device each tensor is."""
        for name, tensor in _tables(self).items():
            logger.debug("tensor: name=%s device=%s", name, tensor.device)
        for i, chunk in enumerate(self.data_chunks):
            logger.debug(
                "data chunk: index=%d bytestream_device=%s lengths_device=%s",
                i,
                chunk.bytestream.device,
                chunk.bytestream_lengths.device,
            )

    def _check(self) -> None:
        _check_tables(self)
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


def _tables(output: CacheGenEncoderOutput | CacheGenGPUEncoderOutput) -> dict[str, torch.Tensor]:
    return {name: getattr(output, name) for name in ("cdf", "max_tensors_key", "max_tensors_value")}


def _check_tables(output: CacheGenEncoderOutput | CacheGenGPUEncoderOutput) -> None:
    _check_count("num_heads", output.num_heads)
    _check_count("head_size", output.head_size)
    keys, num_channels = output.max_tensors_key, output.num_heads * output.head_size
    check_tensor("cdf", output.cdf, (torch.int16,), (None, num_channels, None))
    check_tensor("max_tensors_key", keys, SCALE_DTYPES, (None, None, 1))
    check_tensor("max_tensors_value", output.max_tensors_value, (keys.dtype,), tuple(keys.shape))
    if output.cdf.shape[0] != 2 * keys.shape[0]:
        raise SerdeError(
            f"a cdf of {output.cdf.shape[0]} layers, largest magnitudes of {keys.shape[0]}: must be"
            " two for each"
        )


def _check_count(name: str, number: int) -> None:
    if not (isinstance(number, int) and 0 <= number <= MAX_COUNT):
        raise SerdeError(f"{name} {number!r} must be a whole number, 0 to {MAX_COUNT}")


def _sealed(kind: str, numbers: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a file of tensors, which may be on any device."""
    # Copies: the library refuses tensors that share memory.
    owned = {name: dense(tensor).clone() for name, tensor in tensors.items()}
    file = safetensors.torch.save(owned | {"numbers": torch.tensor(numbers, dtype=torch.int64)})
    return seal(kind, torch.frombuffer(bytearray(file), dtype=torch.uint8), file)


def _unsealed(data: BytesLike, kind: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the whole numbers and the tensors of a file.

    Raises:
        SerdeError: The bytes are no such file, or are damaged.
    """
    _, file = unseal(data, kind)
    try:
        tensors = safetensors.torch.load(bytes(file))
        return tensors.pop("numbers").tolist(), tensors
    # The library checks a header; sizes or dtypes that torch does not have are torch's errors.
    except (safetensors.SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise SerdeError(f"a CacheGen output cannot be read: {exc}") from exc
