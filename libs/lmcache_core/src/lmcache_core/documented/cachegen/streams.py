"""The documented functions of the CacheGen coder: KV to streams and back. Needs torch and numba.

One stream for each layer (those of the keys first, then those of the values) and channel, coded
with that channel's own distribution. It is a stream of the live codec (`serde/rans.py`), a section
of one channel: at least 128 bytes, its words little-endian. Tensors may be on any device; streams
are coded on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_core.documented.cachegen.outputs import (
    CacheGenGPUBytestream,
    CacheGenGPUEncoderOutput,
    check_tensor,
)
from lmcache_core.documented.cachegen.quantization import (
    channel_distributions,
    torch_quant_vectorized,
    whole_bins,
)
from lmcache_core.errors import LayoutError, SerdeError
from lmcache_core.serde.cachegen import MAX_BINS, CacheGenConfig
from lmcache_core.serde.machine_code import load_loops
from lmcache_core.serde.tables import LANES, STATE_WORDS, TOTAL, max_words, reciprocals

Integers = npt.NDArray[np.int64]

MAX_RECOMBINED_BYTES = 1 << 30
_WORD_BYTES = 2
_FIRST_TABLE = np.zeros(1, np.uint8)
"""The one channel of a section is coded with the one table that is given."""
_SYMBOL_DTYPES = (torch.int8, torch.uint8)


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
        ConfigError: Bins cannot be used.
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
    (keys, max_keys), (values, max_values) = (
        torch_quant_vectorized(bins, kv[:, side].flatten(2))
        for side, bins in enumerate((key_bins, value_bins))
    )
    symbols = torch.cat((keys, values))
    cdf = channel_distributions(symbols, num_bins)
    data_chunks = []
    for start in range(0, num_tokens, chunk_size):
        chunk = symbols[:, start : start + chunk_size]
        stream, lengths = (part.to(kv.device) for part in _encoded(cdf, chunk))
        data_chunks.append(CacheGenGPUBytestream(stream, lengths, chunk.shape[1]))
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
        output_buffer: uint8, `[nlayers, nchannels, BUFFER_SIZE]`; written. 128 bytes and two
            for each token are always enough.
        output_lengths: int32, `[nlayers, nchannels]`; written: how much of each buffer is a stream.

    Returns:
        All streams one after the other (`collect_bytes`): uint8, one-dimensional, new, on the
        device of `output_buffer`.

    Raises:
        SerdeError: A buffer is too short, the cdf does not rise, or a value is beyond it. Nothing
            is written then.
        LayoutError: Shapes or dtypes are others.
    """
    check_tensor("encode_input", encode_input, _SYMBOL_DTYPES, (None, None, None), LayoutError)
    num_layers, _, num_channels = encode_input.shape
    sizes = (num_layers, num_channels)
    check_tensor("cdf_int", cdf_int, (torch.int16,), (*sizes, None), LayoutError)
    check_tensor("output_buffer", output_buffer, (torch.uint8,), (*sizes, None), LayoutError)
    check_tensor("output_lengths", output_lengths, (torch.int32,), sizes, LayoutError)
    stream, lengths = _encoded(cdf_int, encode_input)
    stream, room = stream.to(output_buffer.device), output_buffer.shape[2]
    _refuse(
        (lengths > room).numpy(), "the buffer is too short: give 128 bytes and 2 for each token"
    )
    output_lengths.copy_(lengths)
    in_streams = torch.arange(room) < lengths[:, :, None]
    output_buffer[in_streams.to(output_buffer.device)] = stream
    return stream


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
    check_tensor("output_buffer", output_buffer, (torch.uint8,), (None, None, None), LayoutError)
    num_layers, num_channels, room = output_buffer.shape
    check_tensor(
        "output_lengths", output_lengths, (torch.int32,), (num_layers, num_channels), LayoutError
    )
    if output_lengths.numel():
        shortest, longest = (int(length) for length in output_lengths.aminmax())
        if not 0 <= shortest <= longest <= room:
            raise SerdeError(
                f"lengths of streams are {shortest} to {longest}, buffers have {room} bytes"
            )
    positions = torch.arange(room, dtype=torch.int32, device=output_buffer.device)
    return output_buffer[positions < output_lengths.to(output_buffer.device)[:, :, None]]


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
    check_tensor("output_lengths", output_lengths, (torch.int32,), (None, None), LayoutError)
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
    """
    check_tensor("target_buffer", target_buffer, _SYMBOL_DTYPES, (None, None, None), LayoutError)
    num_layers, num_tokens, num_channels = target_buffer.shape
    sizes = (num_layers, num_channels)
    check_tensor("cdf", cdf, (torch.int16,), (*sizes, None), LayoutError)
    lengths = data_chunk.bytestream_lengths
    check_tensor("bytestream_lengths", lengths, (torch.int32,), sizes, LayoutError)
    if data_chunk.ntokens != num_tokens:
        raise SerdeError(f"a data chunk of {data_chunk.ntokens} tokens, a buffer for {num_tokens}")
    offsets = _stream_offsets(data_chunk.bytestream, lengths)
    slots, decode_sections = _slots(cdf).reshape(-1, cdf.shape[2]), load_loops().decode_sections
    data = data_chunk.bytestream.detach().cpu().numpy()
    num_words, rest = np.divmod(np.diff(offsets), _WORD_BYTES)
    is_damaged = (rest > 0) | (num_words < LANES * STATE_WORDS)
    symbols = np.zeros((len(slots), num_tokens), np.uint8)
    place = 0, num_tokens, 1, 1, 0
    for i in np.flatnonzero(~is_damaged):
        frequencies = np.diff(slots[i])
        slot_symbol = np.repeat(np.arange(len(frequencies), dtype=np.uint8), frequencies)
        entries = (slots[i, :-1] << 16 | frequencies).astype(np.uint32)
        words = np.frombuffer(data[offsets[i] : offsets[i + 1]].tobytes(), "<u2")
        is_damaged[i] = decode_sections(
            words, place, num_words[i : i + 1], _FIRST_TABLE, slot_symbol, entries, symbols[i]
        )
    _refuse(is_damaged.reshape(sizes), "the stream is damaged")
    decoded = torch.from_numpy(symbols).view(num_layers, num_channels, num_tokens)
    target_buffer.view(torch.uint8).copy_(decoded.transpose(1, 2))


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
    """
    check_tensor("cdf", cdf, (torch.int16,), (2 * layers_in_key, None, None), LayoutError)
    num_layers, num_channels, _ = cdf.shape
    width = num_layers * num_channels
    check_tensor("output", output, _SYMBOL_DTYPES, (None, width), LayoutError)
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


def _encoded(cdf: torch.Tensor, symbols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the streams of all layers and channels one after the other, uint8, and their lengths,
    int32 `[layers, channels]`; on the CPU.

    Args:
        cdf: As `encode_ntokens` takes it.
        symbols: int8 or uint8 `[layers, tokens, channels]`.
    """
    slots, encode_sections = _slots(cdf), load_loops().encode_sections
    values = symbols.detach().cpu().view(torch.uint8).transpose(1, 2).numpy()
    num_bins = slots.shape[2] - 1
    _refuse(values.max(-1, initial=0) >= num_bins, "a value is beyond the last one of the cdf")
    section = values.shape[2], 1, 1, num_bins
    words, length = np.empty(max_words(values.shape[2]), np.uint16), np.zeros(1, np.int64)
    streams = [words[:0].astype("<u2")]  # an empty one: KV may have no channels
    for layer in range(len(slots)):
        frequencies = np.diff(slots[layer])
        # Of each channel, for each symbol: what the coder needs (`ShapeTables.coder`).
        coder = np.stack((frequencies, slots[layer, :, :-1], *reciprocals(frequencies)), axis=2)
        rows = np.ascontiguousarray(values[layer])
        for row, entries in zip(rows, coder.astype(np.uint32), strict=True):
            begin = encode_sections(row, section, _FIRST_TABLE, entries, words, length)
            streams.append(words[begin:].astype("<u2"))
    lengths = torch.tensor([stream.nbytes for stream in streams[1:]], dtype=torch.int32)
    joined = torch.from_numpy(np.concatenate(streams).view(np.uint8))
    return joined, lengths.view(slots.shape[:2])


def _check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise LayoutError(f"chunk_size {chunk_size} holds no token: give at least 1")


def _slots(cdf: torch.Tensor) -> Integers:
    """Return where the slots of symbols begin, and where the last ones end, `[layers, channels,
    bins + 1]`: the 2^16 parts of the cdf shared out among the coder's `TOTAL`, at least one each.

    Raises:
        LayoutError: There are too few or too many bins.
        SerdeError: A row does not rise from 0.
    """
    num_bins = cdf.shape[2] - 1
    if not 1 <= num_bins <= MAX_BINS:
        raise LayoutError(
            f"cdf has {num_bins + 1} entries: give one for each bin and one more, 2 to 257"
        )
    parts = cdf.detach().cpu().contiguous().numpy().view(np.uint16).astype(np.int64)
    parts[:, :, -1] = 1 << 16
    rises = np.diff(parts).min(-1, initial=1) > 0
    _refuse((parts[:, :, 0] != 0) | ~rises, "the cdf does not rise from 0")
    return (parts * (TOTAL - num_bins) >> 16) + np.arange(num_bins + 1)


def _stream_offsets(bytestream: torch.Tensor, lengths: torch.Tensor) -> Integers:
    """Return where each stream begins, and where the last one ends: one more than there are
    streams, checked against the bytes.
    """
    check_tensor("bytestream", bytestream, (torch.uint8,), (None,), LayoutError)
    sizes = lengths.detach().cpu().numpy().reshape(-1)
    offsets = np.append(0, np.cumsum(sizes, dtype=np.int64))
    if (sizes < 0).any() or offsets[-1] != bytestream.numel():
        raise SerdeError(
            f"lengths of streams add up to {int(offsets[-1])} bytes, {bytestream.numel()} are"
            " there, or one is negative"
        )
    return offsets


def _refuse(is_wrong: npt.NDArray[Any], why: str) -> None:
    """Raise for the first stream `[layer, channel]` that is wrong."""
    if is_wrong.any():
        layer, channel = np.argwhere(is_wrong)[0].tolist()
        raise SerdeError(f"layer {layer}, channel {channel}: {why}")
