"""The documented functions of the CacheGen coder: KV to streams and back. Needs torch; coding needs
numba.

One stream for each layer (those of the keys first, then those of the values) and channel, coded
with that channel's own distribution. Tensors may be on any device; the coder works on the CPU, so
that those of another one are copied there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lmcache_core.documented.cachegen.channel_streams import (
    FAULT_ROOM,
    FAULT_STREAM,
    FAULT_SYMBOL,
    FAULT_TABLE,
    NO_FAULT,
    compile_channel_streams,
    max_stream_bytes,
)
from lmcache_core.documented.cachegen.outputs import CacheGenGPUBytestream, CacheGenGPUEncoderOutput
from lmcache_core.documented.cachegen.quantization import (
    channel_distributions,
    torch_quant_vectorized,
    whole_bins,
)
from lmcache_core.errors import LayoutError, SerdeError
from lmcache_core.serde.cachegen import CacheGenConfig

MAX_RECOMBINED_BYTES = 1 << 30
_SYMBOL_DTYPES = (torch.int8, torch.uint8)
_FAULTS = (
    (FAULT_TABLE, "the cdf does not rise from 0, or leaves a value without a probability"),
    (FAULT_SYMBOL, "a value is beyond the last one of the cdf"),
    (FAULT_ROOM, "the buffer is too short: give 4 bytes and 2 for each token"),
    (FAULT_STREAM, "the stream is damaged"),
)


def encode_function(
    kv: torch.Tensor,
    config: CacheGenConfig,
    key_bins: torch.Tensor,
    value_bins: torch.Tensor,
    chunk_size: int,
) -> CacheGenGPUEncoderOutput:
    """Quantise KV, count what occurs, and code it.

    Args:
        kv: Floating point, `[nlayers, 2, ntokens, num_heads, head_size]`, keys before values. Only
            read.
        config: Of a model with that many layers.
        key_bins: Bins of the keys of each layer, `[nlayers]`.
        value_bins: Bins of the values, likewise.
        chunk_size: Most tokens of a data chunk, at least 1.

    Returns:
        Data chunks in the order of the tokens, the last one with what is left; one distribution of
        all tokens, `[2 * nlayers, nchannels, bins + 1]` with the largest number of bins of a layer;
        largest magnitudes in the dtype of `kv`. All new, on the device of `kv`.

    Raises:
        ConfigError: Bins cannot be used, or numba is not installed.
        LayoutError: Shapes or dtypes are others, or the config is of another model.
    """
    if kv.ndim != 5 or kv.shape[1] != 2:
        raise LayoutError(f"kv {tuple(kv.shape)}: give [nlayers, 2, ntokens, num_heads, head_size]")
    if config.nlayers != kv.shape[0]:
        raise LayoutError(
            f"kv of {kv.shape[0]} layers with a config of {config.nlayers}: give"
            f" CacheGenConfig.for_num_layers({kv.shape[0]})"
        )
    _check_chunk_size(chunk_size)
    num_layers, _, num_tokens, num_heads, head_size = kv.shape
    num_bins = max(*whole_bins(key_bins, num_layers), *whole_bins(value_bins, num_layers))
    keys, max_keys = torch_quant_vectorized(
        key_bins, kv[:, 0].reshape(num_layers, num_tokens, num_heads * head_size)
    )
    values, max_values = torch_quant_vectorized(
        value_bins, kv[:, 1].reshape(num_layers, num_tokens, num_heads * head_size)
    )
    symbols = torch.cat((keys, values))
    cdf = channel_distributions(symbols, num_bins)
    data_chunks = []
    for start in range(0, num_tokens, chunk_size):
        chunk = symbols[:, start : start + chunk_size]
        shape = (symbols.shape[0], symbols.shape[2])
        lengths = torch.empty(shape, dtype=torch.int32, device=kv.device)
        buffer = torch.empty((*shape, max_stream_bytes(chunk.shape[1])), dtype=torch.uint8)
        bytestream = encode_ntokens(cdf, chunk, buffer, lengths).to(kv.device)
        data_chunks.append(CacheGenGPUBytestream(bytestream, lengths, chunk.shape[1]))
    return CacheGenGPUEncoderOutput(data_chunks, cdf, max_keys, max_values, num_heads, head_size)


def encode_ntokens(
    cdf_int: torch.Tensor,
    encode_input: torch.Tensor,
    output_buffer: torch.Tensor,
    output_lengths: torch.Tensor,
) -> torch.Tensor:
    """Code a batch of tokens.

    Args:
        cdf_int: int16 with the bits of uint16, `[nlayers, nchannels, bins + 1]`.
        encode_input: int8 or uint8, `[nlayers, ntokens, nchannels]`, values 0 to `bins - 1`.
        output_buffer: uint8, `[nlayers, nchannels, BUFFER_SIZE]`; written. Four bytes and two for
            each token are always enough.
        output_lengths: int32, `[nlayers, nchannels]`; written: how much of each buffer is a stream.

    Returns:
        All streams one after the other (`collect_bytes`): uint8, one-dimensional, new, on the
        device of `output_buffer`.

    Raises:
        SerdeError: A buffer is too short, or a value has no probability. The outputs are partly
            written then.
        LayoutError: Shapes or dtypes are others.
        ConfigError: numba is not installed.
    """
    _check("encode_input", encode_input, _SYMBOL_DTYPES, (None, None, None))
    num_layers, _, num_channels = encode_input.shape
    _check("cdf_int", cdf_int, (torch.int16,), (num_layers, num_channels, None))
    _check("output_buffer", output_buffer, (torch.uint8,), (num_layers, num_channels, None))
    _check("output_lengths", output_lengths, (torch.int32,), (num_layers, num_channels))
    _check_entries(cdf_int)
    buffers = _on_host(output_buffer)
    lengths = _on_host(output_lengths)
    symbols = _on_host(encode_input).view(torch.uint8)
    encode = compile_channel_streams().encode
    _raise_fault(
        *encode(_table(cdf_int), symbols.numpy(), buffers.numpy(), lengths.numpy()), num_channels
    )
    _write_back(buffers, output_buffer)
    _write_back(lengths, output_lengths)
    return collect_bytes(buffers, lengths).to(output_buffer.device)


def collect_bytes(output_buffer: torch.Tensor, output_lengths: torch.Tensor) -> torch.Tensor:
    """Put the streams of all layers and channels one after the other, the channels of a layer
    together.

    Args:
        output_buffer: uint8, `[nlayers, nchannels, BUFFER_SIZE]`.
        output_lengths: int32, `[nlayers, nchannels]`.

    Returns:
        uint8, one-dimensional, new, on the device of `output_buffer`.

    Raises:
        SerdeError: A length is negative or longer than a buffer.
        LayoutError: Shapes or dtypes are others.
    """
    _check("output_buffer", output_buffer, (torch.uint8,), (None, None, None))
    _check("output_lengths", output_lengths, (torch.int32,), tuple(output_buffer.shape[:2]))
    shortest, longest = (
        (int(output_lengths.min()), int(output_lengths.max())) if output_lengths.numel() else (0, 0)
    )
    if not 0 <= shortest <= longest <= output_buffer.shape[2]:
        raise SerdeError(
            f"lengths of streams are {shortest} to {longest}, buffers have {output_buffer.shape[2]}"
            " bytes"
        )
    positions = torch.arange(longest, dtype=torch.int32, device=output_buffer.device)
    return output_buffer[:, :, :longest][
        positions < output_lengths.to(output_buffer.device)[:, :, None]
    ]


def recombine_bytes(bytes_tensor: torch.Tensor, output_lengths: torch.Tensor) -> torch.Tensor:
    """Undo `collect_bytes`: each stream at the beginning of a buffer of its own.

    Args:
        bytes_tensor: uint8, one-dimensional: streams one after the other.
        output_lengths: int32, `[nlayers, nchannels]`: their lengths.

    Returns:
        uint8, `[nlayers, nchannels, length of the longest]`, zeros after the streams; new, on the
        device of `bytes_tensor`.

    Raises:
        SerdeError: The lengths do not add up to the bytes, or the result would be longer than
            `MAX_RECOMBINED_BYTES`.
        LayoutError: Shapes or dtypes are others.
    """
    _check("output_lengths", output_lengths, (torch.int32,), (None, None))
    _stream_offsets(bytes_tensor, output_lengths)
    lengths = output_lengths.to(bytes_tensor.device)
    room = int(lengths.max()) if lengths.numel() else 0
    if lengths.numel() * room > MAX_RECOMBINED_BYTES:
        raise SerdeError(
            f"{lengths.numel()} buffers of {room} bytes are more than {MAX_RECOMBINED_BYTES}"
        )
    buffers = torch.zeros((*lengths.shape, room), dtype=torch.uint8, device=bytes_tensor.device)
    positions = torch.arange(room, dtype=torch.int32, device=bytes_tensor.device)
    buffers[positions < lengths[:, :, None]] = bytes_tensor
    return buffers


def decode_chunk(
    cdf: torch.Tensor, data_chunk: CacheGenGPUBytestream, target_buffer: torch.Tensor
) -> None:
    """Decode one data chunk.

    Args:
        cdf: int16 with the bits of uint16, `[nlayers (of keys and values), nchannels, bins + 1]`.
        data_chunk: As `encode_function` made it; what it says of itself is checked.
        target_buffer: int8 or uint8, `[nlayers, ntokens, nchannels]`, any strides; written, not at
            an error.

    Raises:
        SerdeError: The chunk is damaged or does not fit the buffer. Damage that ends as a stream
            does is not noticed.
        LayoutError: Shapes or dtypes are others.
        ConfigError: numba is not installed.
    """
    _check("target_buffer", target_buffer, _SYMBOL_DTYPES, (None, None, None))
    num_layers, num_tokens, num_channels = target_buffer.shape
    _check("cdf", cdf, (torch.int16,), (num_layers, num_channels, None))
    _check(
        "bytestream_lengths",
        data_chunk.bytestream_lengths,
        (torch.int32,),
        (num_layers, num_channels),
    )
    _check_entries(cdf)
    if data_chunk.ntokens != num_tokens:
        raise SerdeError(f"a data chunk of {data_chunk.ntokens} tokens, a buffer for {num_tokens}")
    offsets = _stream_offsets(data_chunk.bytestream, data_chunk.bytestream_lengths)
    symbols = torch.empty((num_layers, num_tokens, num_channels), dtype=torch.uint8)
    decode = compile_channel_streams().decode
    _raise_fault(
        *decode(_table(cdf), _on_host(data_chunk.bytestream).numpy(), offsets, symbols.numpy()),
        num_channels,
    )
    target_buffer.view(torch.uint8).copy_(symbols)


def decode_function_gpu(
    cdf: torch.Tensor,
    data_chunks: Sequence[CacheGenGPUBytestream],
    layers_in_key: int,
    chunk_size: int,
    output: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode all data chunks of an encoding.

    Args:
        cdf: int16 with the bits of uint16, `[2 * nlayers, nchannels, bins + 1]`.
        data_chunks: In the order of the tokens.
        layers_in_key: `nlayers`.
        chunk_size: Most tokens of a data chunk.
        output: int8 or uint8, `[ntokens, 2 * nlayers * nchannels]`, contiguous; written: for each
            token the values of all layers of the keys, then of all layers of the values.

    Returns:
        The quantised keys and values, float32, each `[nlayers, ntokens, nchannels]`; new, on the
        device of `output`.

    Raises:
        SerdeError: A chunk is damaged, longer than `chunk_size`, or all of them do not fit the
            output, which is partly written then.
        LayoutError: Shapes or dtypes are others.
        ConfigError: numba is not installed.
    """
    _check("cdf", cdf, (torch.int16,), (2 * layers_in_key, None, None))
    num_layers, num_channels, _ = cdf.shape
    _check("output", output, _SYMBOL_DTYPES, (None, num_layers * num_channels))
    _check_chunk_size(chunk_size)
    if not output.is_contiguous():
        raise LayoutError("output has gaps: give a contiguous tensor")
    num_tokens = output.shape[0]
    counts = [chunk.ntokens for chunk in data_chunks]
    if any(not 0 <= count <= chunk_size for count in counts) or sum(counts) != num_tokens:
        raise SerdeError(
            f"data chunks of {counts} tokens: they do not fill {num_tokens} tokens in chunks of at"
            f" most {chunk_size}"
        )
    symbols = output.view(torch.uint8).view(num_tokens, num_layers, num_channels).permute(1, 0, 2)
    start = 0
    for chunk in data_chunks:
        decode_chunk(cdf, chunk, symbols[:, start : start + chunk.ntokens])
        start += chunk.ntokens
    decoded = symbols.to(torch.float32, memory_format=torch.contiguous_format)
    return decoded[:layers_in_key], decoded[layers_in_key:]


def _check(
    name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: tuple[int | None, ...]
) -> None:
    fits = tensor.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise LayoutError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}: give {' or '.join(map(str, dtypes))}"
            f" [{sizes}]"
        )


def _check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise LayoutError(f"chunk_size {chunk_size} holds no token: give at least 1")


def _check_entries(cdf: torch.Tensor) -> None:
    if not 2 <= cdf.shape[2] <= 257:
        raise LayoutError(
            f"cdf has {cdf.shape[2]} entries: give one for each bin and one more, 2 to 257"
        )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself where it is contiguous on the CPU, else a copy there."""
    return tensor.detach().to("cpu").contiguous()


def _write_back(worked_on: torch.Tensor, tensor: torch.Tensor) -> None:
    if worked_on.data_ptr() != tensor.data_ptr():
        tensor.copy_(worked_on)


def _table(cdf: torch.Tensor) -> Any:
    return _on_host(cdf).numpy().view(np.uint16)


def _stream_offsets(bytestream: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Return where each stream begins, and where the last one ends: int64, one more than there are
    streams, checked against the bytes.
    """
    _check("bytestream", bytestream, (torch.uint8,), (None,))
    sizes = _on_host(lengths).numpy().reshape(-1)
    offsets = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, dtype=np.int64, out=offsets[1:])
    if (sizes < 0).any() or offsets[-1] != bytestream.numel():
        raise SerdeError(
            f"lengths of streams add up to {int(offsets[-1])} bytes, {bytestream.numel()} are"
            " there, or one is negative"
        )
    return offsets


def _raise_fault(fault: int, stream: int, num_channels: int) -> None:
    if fault != NO_FAULT:
        layer, channel = divmod(stream, num_channels)
        raise SerdeError(f"layer {layer}, channel {channel}: {dict(_FAULTS)[fault]}")
