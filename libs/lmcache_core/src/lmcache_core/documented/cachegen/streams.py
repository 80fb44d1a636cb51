"""The documented functions of the CacheGen coder: KV to streams and back. Needs torch.

One stream for each layer (those of the keys first, then those of the values) and channel, coded
with that channel's own distribution by a range asymmetric numeral system: 32-bit state, one byte at
a time. Tensors may be on any device; numpy codes on the CPU, all streams at once, token by token.

The state is 2^23 before the first symbol and stays in [2^23, 2^31). Probabilities have 16 bits:
symbol `s` of a channel spans `[cdf[s], cdf[s + 1])` of 2^16, the last one up to 2^16 itself,
whatever the table says there. Tokens are coded last to first, so that they are decoded first to
last. A stream is the final state, four bytes, little-endian, then the bytes in the order in which
decoding takes them; it takes at most two bytes a token and these four. Decoding ends in the state
in which coding began, with no byte left: damage that does not end there is noticed, other damage
gives wrong symbols.

Source: Duda, "Asymmetric numeral systems", arXiv 1311.2540, section 3; the byte-wise form is the
    usual one, with `freq << 15` as the bound above which a byte leaves the state before a symbol of
    that frequency.
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
from lmcache_core.serde.cachegen import CacheGenConfig

Integers = npt.NDArray[np.int64]

MAX_RECOMBINED_BYTES = 1 << 30
STATE_BYTES = 4
MAX_BYTES_PER_SYMBOL = 2
LOWEST_STATE, END_OF_STATES = 1 << 23, 1 << 31
TOTAL = 1 << 16
"""Probabilities of a channel sum to this."""
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
        stream, lengths = _collected(*_encoded(_table(cdf), chunk))
        data_chunks.append(
            CacheGenGPUBytestream(stream.to(kv.device), lengths.to(kv.device), chunk.shape[1])
        )
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
        SerdeError: A buffer is too short, or a value has no probability. Nothing is written then.
        LayoutError: Shapes or dtypes are others.
    """
    check_tensor("encode_input", encode_input, _SYMBOL_DTYPES, (None, None, None), LayoutError)
    num_layers, _, num_channels = encode_input.shape
    sizes = (num_layers, num_channels)
    check_tensor("cdf_int", cdf_int, (torch.int16,), (*sizes, None), LayoutError)
    check_tensor("output_buffer", output_buffer, (torch.uint8,), (*sizes, None), LayoutError)
    check_tensor("output_lengths", output_lengths, (torch.int32,), sizes, LayoutError)
    buffers, begins = _encoded(_table(cdf_int), encode_input)
    stream, lengths = _collected(buffers, begins)
    room = output_buffer.shape[2]
    _refuse((lengths > room).numpy(), "the buffer is too short: give 4 bytes and 2 for each token")
    output_lengths.copy_(lengths)
    in_streams = torch.arange(room) < lengths[:, :, None]
    output_buffer[in_streams.to(output_buffer.device)] = stream.to(output_buffer.device)
    return stream.to(output_buffer.device)


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
    table = _table(cdf)
    if data_chunk.ntokens != num_tokens:
        raise SerdeError(f"a data chunk of {data_chunk.ntokens} tokens, a buffer for {num_tokens}")
    offsets = _stream_offsets(data_chunk.bytestream, lengths)
    rises = np.diff(table[:, :, :-1]).min(-1, initial=1) > 0
    _refuse((table[:, :, 0] != 0) | ~rises, "the cdf does not rise from 0")
    data = data_chunk.bytestream.detach().cpu().numpy()
    symbols, is_damaged = _decoded(table.reshape(-1, table.shape[2]), data, offsets, num_tokens)
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


def _encoded(table: Integers, symbols: torch.Tensor) -> tuple[npt.NDArray[np.uint8], Integers]:
    """Code every channel of every layer.

    Args:
        table: Of `_table`.
        symbols: int8 or uint8 `[layers, tokens, channels]`.

    Returns:
        Buffers `[layers, channels, room]`, each of which ends with a stream, and where it begins.
    """
    values = symbols.detach().cpu().view(torch.uint8).transpose(1, 2).numpy().astype(np.int64)
    num_tokens = values.shape[2]
    _refuse(
        values.max(-1, initial=0) > table.shape[2] - 2, "a value is beyond the last one of the cdf"
    )
    lows = np.take_along_axis(table, values, -1)
    frequencies = np.take_along_axis(table, values + 1, -1) - lows
    _refuse(
        frequencies.min(-1, initial=1) <= 0,
        "the cdf does not rise, or leaves a value without a probability",
    )
    room = STATE_BYTES + MAX_BYTES_PER_SYMBOL * num_tokens
    buffers = np.zeros((*values.shape[:2], room), np.uint8)
    states, at = np.full(values.shape[:2], LOWEST_STATE), np.full(values.shape[:2], room)
    for token in reversed(range(num_tokens)):
        frequency = frequencies[:, :, token]
        for _ in range(MAX_BYTES_PER_SYMBOL):
            is_full = states >= frequency << 15
            at -= is_full
            buffers[(*np.nonzero(is_full), at[is_full])] = states[is_full] & 0xFF
            states = np.where(is_full, states >> 8, states)
        quotient, rest = np.divmod(states, frequency)
        states = quotient * TOTAL + rest + lows[:, :, token]
    for byte in reversed(range(STATE_BYTES)):
        at -= 1
        np.put_along_axis(buffers, at[:, :, None], (states >> 8 * byte & 0xFF)[:, :, None], -1)
    return buffers, at


def _collected(
    buffers: npt.NDArray[np.uint8], begins: Integers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all streams one after the other, and their lengths."""
    room = buffers.shape[2]
    streams = buffers[np.arange(room) >= begins[:, :, None]]
    return torch.from_numpy(streams), torch.from_numpy((room - begins).astype(np.int32))


def _decoded(
    table: Integers, data: npt.NDArray[np.uint8], offsets: Integers, num_tokens: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Decode all streams; reads nothing outside the arrays, whatever they hold.

    Args:
        table: `[streams, entries]`, rising from 0.
        data: All streams.
        offsets: Of `_stream_offsets`.
        num_tokens: Symbols of each stream.

    Returns:
        Symbols `[streams, num_tokens]`, and which streams are damaged.
    """
    at, ends = offsets[:-1].copy(), offsets[1:]
    rows, last_symbol = np.arange(len(at)), table.shape[1] - 2
    padded = np.append(data, np.uint8(0)).astype(np.int64)  # so that there is a last byte
    symbols = np.zeros((len(at), num_tokens), np.uint8)
    states = np.zeros(len(at), np.int64)
    for byte in range(STATE_BYTES):
        states |= padded[np.minimum(at + byte, len(data))] << 8 * byte
    at += STATE_BYTES
    is_damaged = (at > ends) | (states < LOWEST_STATE) | (states >= END_OF_STATES)
    for token in range(num_tokens):
        slots, symbol = states % TOTAL, np.zeros(len(at), np.int64)
        for step in (128, 64, 32, 16, 8, 4, 2, 1):  # the last symbol that begins at or before it
            tried = np.minimum(symbol + step, last_symbol)
            symbol = np.where(table[rows, tried] <= slots, np.maximum(symbol, tried), symbol)
        low = table[rows, symbol]
        states = (table[rows, symbol + 1] - low) * (states // TOTAL) + slots - low
        for _ in range(MAX_BYTES_PER_SYMBOL):
            is_low = states < LOWEST_STATE
            is_damaged |= is_low & (at >= ends)
            states = np.where(is_low, states << 8 | padded[np.minimum(at, len(data))], states)
            at += is_low
        symbols[:, token] = symbol
    return symbols, is_damaged | (states != LOWEST_STATE) | (at != ends)


def _check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise LayoutError(f"chunk_size {chunk_size} holds no token: give at least 1")


def _table(cdf: torch.Tensor) -> Integers:
    """Return where symbols begin, `[layers, channels, bins + 1]`; the last one ends at `TOTAL`."""
    if not 2 <= cdf.shape[2] <= 257:
        raise LayoutError(
            f"cdf has {cdf.shape[2]} entries: give one for each bin and one more, 2 to 257"
        )
    table = cdf.detach().cpu().contiguous().numpy().view(np.uint16).astype(np.int64)
    table[:, :, -1] = TOTAL
    return table


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
    """Raise for the first stream `[layer, channel]` that is wrong.

    Raises:
        SerdeError: One is.
    """
    if is_wrong.any():
        layer, channel = np.argwhere(is_wrong)[0].tolist()
        raise SerdeError(f"layer {layer}, channel {channel}: {why}")
