"""One stream of bytes for each (layer, channel): a single-lane range asymmetric numeral system,
32-bit state, one byte at a time.

The state is 2^23 before the first symbol and stays in [2^23, 2^31). Probabilities have 16 bits:
symbol `s` of a channel spans `[cdf[s], cdf[s + 1])` of 2^16, the last one up to 2^16 itself,
whatever the table says there. Tokens are coded last to first, so that they are decoded first to
last. A stream is the final state, four bytes, little-endian, then the bytes in the order in which
decoding takes them; it takes at most two bytes a token and these four. Decoding ends in the state
in which coding began, with no byte left: damage that does not end there is noticed, other damage
gives wrong symbols.

Source: Duda, "Asymmetric numeral systems", arXiv 1311.2540, section 3; the byte-wise form is the
    usual one, with `freq << 15` as the bound
above which a byte leaves the state before a symbol of that frequency.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmcache_core.serde.machine_code import compiled, require_numba

STATE_BYTES = 4
MAX_BYTES_PER_SYMBOL = 2
PROBABILITY_BITS = 16

NO_FAULT = 0
FAULT_TABLE = 1
FAULT_SYMBOL = 2
FAULT_ROOM = 3
FAULT_STREAM = 4


@dataclass(frozen=True, slots=True)
class ChannelStreams:
    """The compiled loops. They release the GIL, and return a fault and the number of the stream
    (`layer * channels + channel`) that has it.

    Attributes:
        encode: `encode_streams`.
        decode: `decode_streams`.
    """

    encode: Callable[..., tuple[int, int]]
    decode: Callable[..., tuple[int, int]]


@functools.cache
def compile_channel_streams() -> ChannelStreams:
    """Return the loops as machine code: from the cache next to the source, or compiled, once a
    process; takes seconds then.

    Raises:
        ConfigError: numba is not installed.
    """
    require_numba()
    return ChannelStreams(
        encode=compiled(
            encode_streams,
            [
                "UniTuple(int64, 2)(uint16[:, :, ::1], uint8[:, :, ::1], uint8[:, :, ::1], int32[:,"
                " ::1])"
            ],
        ),
        decode=compiled(
            decode_streams,
            ["UniTuple(int64, 2)(uint16[:, :, ::1], uint8[::1], int64[::1], uint8[:, :, ::1])"],
        ),
    )


def max_stream_bytes(num_tokens: int) -> int:
    """Return the most bytes that a stream of so many tokens can have."""
    return STATE_BYTES + MAX_BYTES_PER_SYMBOL * num_tokens


def encode_streams(cdf: Any, symbols: Any, buffers: Any, lengths: Any) -> tuple[int, int]:
    """Code every channel of every layer into the beginning of its buffer.

    Args:
        cdf: uint16 `[layers, channels, entries]`, at least two entries.
        symbols: uint8 `[layers, tokens, channels]`, 0 to `entries - 2`.
        buffers: uint8 `[layers, channels, room]`; written. After a stream it holds anything.
        lengths: int32 `[layers, channels]`; written.

    Returns:
        `NO_FAULT`, `FAULT_TABLE` (a symbol has no probability), `FAULT_SYMBOL` (there is no such)
        or `FAULT_ROOM`; and the stream.
    """
    num_layers, num_tokens, num_channels = symbols.shape
    last_symbol = cdf.shape[2] - 2
    room = buffers.shape[2]
    for layer in range(num_layers):
        for channel in range(num_channels):
            stream = layer * num_channels + channel
            table = cdf[layer, channel]
            buffer = buffers[layer, channel]
            state = np.uint64(1 << 23)
            position = room
            for back in range(num_tokens):
                symbol = np.int64(symbols[layer, num_tokens - 1 - back, channel])
                if symbol > last_symbol:
                    return FAULT_SYMBOL, stream
                low = np.int64(table[symbol])
                high = np.int64(table[symbol + 1]) if symbol < last_symbol else np.int64(1 << 16)
                if high <= low:
                    return FAULT_TABLE, stream
                frequency = np.uint64(high - low)
                while state >= frequency << np.uint64(15):
                    if position <= STATE_BYTES:
                        return FAULT_ROOM, stream
                    position -= 1
                    buffer[position] = state & np.uint64(0xFF)
                    state >>= np.uint64(8)
                quotient = state // frequency
                state = (
                    (quotient << np.uint64(16)) + (state - quotient * frequency) + np.uint64(low)
                )
            if position < STATE_BYTES:
                return FAULT_ROOM, stream
            position -= STATE_BYTES
            for i in range(STATE_BYTES):
                buffer[position + i] = (state >> np.uint64(8 * i)) & np.uint64(0xFF)
            for i in range(room - position):
                buffer[i] = buffer[position + i]
            lengths[layer, channel] = room - position
    return NO_FAULT, 0


def decode_streams(cdf: Any, data: Any, offsets: Any, symbols: Any) -> tuple[int, int]:
    """Decode every channel of every layer. Reads nothing outside the arrays and ends, whatever they
    hold.

    Args:
        cdf: uint16 `[layers, channels, entries]`, at least two entries.
        data: uint8, all streams.
        offsets: int64 `[layers * channels + 1]`: where each stream begins in `data`, and where the
            last one ends. Never falling, and within `data`: the caller has checked.
        symbols: uint8 `[layers, tokens, channels]`; written, at a fault only in part.

    Returns:
        `NO_FAULT`, `FAULT_TABLE` (a table does not begin at 0 or does not rise) or `FAULT_STREAM`
        (damaged); and the stream.
    """
    num_layers, num_tokens, num_channels = symbols.shape
    num_symbols = cdf.shape[2] - 1
    for layer in range(num_layers):
        for channel in range(num_channels):
            stream = layer * num_channels + channel
            table = cdf[layer, channel]
            if table[0] != 0:
                return FAULT_TABLE, stream
            for i in range(1, num_symbols):
                if table[i] <= table[i - 1]:
                    return FAULT_TABLE, stream
            position = offsets[stream]
            end = offsets[stream + 1]
            if end - position < STATE_BYTES:
                return FAULT_STREAM, stream
            state = np.int64(0)
            for i in range(STATE_BYTES):
                state |= np.int64(data[position + i]) << np.int64(8 * i)
            position += STATE_BYTES
            if state < 1 << 23 or state >= 1 << 31:
                return FAULT_STREAM, stream
            for token in range(num_tokens):
                slot = state & 0xFFFF
                symbol = 0
                above = num_symbols
                while above - symbol > 1:
                    middle = (symbol + above) >> 1
                    if np.int64(table[middle]) <= slot:
                        symbol = middle
                    else:
                        above = middle
                low = np.int64(table[symbol])
                high = np.int64(table[above]) if above < num_symbols else np.int64(1 << 16)
                state = (high - low) * (state >> 16) + slot - low
                while state < 1 << 23:
                    if position == end:
                        return FAULT_STREAM, stream
                    state = (state << 8) | np.int64(data[position])
                    position += 1
                symbols[layer, token, channel] = symbol
            if state != 1 << 23 or position != end:
                return FAULT_STREAM, stream
    return NO_FAULT, 0
