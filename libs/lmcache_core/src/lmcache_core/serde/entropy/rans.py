"""Interleaved rANS: the loops that turn symbols into 16-bit words and back. Compiled by `compiled`; `docs/codec.md` is the specification.

A run of symbols is coded by `LANES` coders in turn: symbol i belongs to lane `i % LANES`. The stream begins with the final state of each
lane (two words, upper half first) and goes on with the words in the order in which a decoder needs them. Encoding runs backwards.

Source: Duda, arXiv:1311.2540; Giesen, "Interleaved entropy coders", arXiv:1402.3392.
"""

from __future__ import annotations

from typing import Any

from numba import uint8, uint16, uint32, uint64

from lmcache_core.serde.entropy.tables import PRECISION_BITS

LANES = 32
STATE_WORDS = 2
LOWEST_STATE = 1 << 15
"""Between symbols a state is in `LOWEST_STATE … 2^31 - 1`."""
WORD_BITS = 16

ENCODE_SIGNATURE = "int64(uint8[::1], UniTuple(int64, 3), uint8[::1], uint32[:, ::1], uint16[::1], uint32[::1])"
DECODE_SIGNATURE = (
    "int64(Array(uint16, 1, 'C', readonly=True), UniTuple(int64, 5), uint8[::1], uint8[::1], uint32[::1], uint8[::1], uint32[::1])"
)


def max_words(num_symbols: int) -> int:
    """Words that a run of so many symbols takes at most: no symbol takes more than one."""
    return num_symbols + LANES * STATE_WORDS


def encode_run(symbols: Any, shape: tuple[int, int, int], columns: Any, tables: Any, words: Any, states: Any) -> int:
    """Encode rows of symbols.

    Args:
        symbols: uint8 `[tokens * width]`.
        shape: Rows (tokens), symbols of a row (width), entries of one table (stride).
        columns: uint8 `[width]`: which table each column has; every symbol has a frequency there.
        tables: uint32 `[4, entries]`: of each (table, symbol) the frequency, where its slots start, reciprocal and its shift.
        words: uint16, filled from its end; at least `max_words(tokens * width)`.
        states: uint32 `[LANES]`, scratch.

    Returns:
        Where in `words` the stream begins; it ends with `words`.
    """
    tokens, width, stride = shape
    frequency, start, reciprocal, reciprocal_shift = tables[0], tables[1], tables[2], tables[3]
    for lane in range(LANES):
        states[lane] = uint32(LOWEST_STATE)
    at = uint64(words.size)
    index = uint64(tokens) * uint64(width)
    for _ in range(tokens):
        for back in range(width):
            column = uint64(width - 1 - back)
            index -= uint64(1)
            entry = uint64(columns[column]) * uint64(stride) + uint64(symbols[index])
            lane = index & uint64(LANES - 1)
            state = states[lane]
            count = frequency[entry]
            is_full = uint64(uint64(state) >= (uint64(count) << uint64(31 - PRECISION_BITS)))
            words[at - uint64(1)] = uint16(state)
            at -= is_full
            state = uint32(state >> uint32(is_full << uint64(4)))
            quotient = uint32((uint64(state) * uint64(reciprocal[entry])) >> uint64(reciprocal_shift[entry]))
            states[lane] = uint32(state + start[entry] + quotient * uint32(uint32(1 << PRECISION_BITS) - count))
    for back in range(LANES):
        state = states[LANES - 1 - back]
        at -= uint64(2)
        words[at] = uint16(state >> uint32(WORD_BITS))
        words[at + uint64(1)] = uint16(state)
    return at


def decode_run(
    words: Any, place: tuple[int, int, int, int, int], columns: Any, slot_symbol: Any, start_and_frequency: Any, symbols: Any, states: Any
) -> int:
    """Decode rows of symbols. Any words give some symbols: nothing outside the arrays is read or written.

    Args:
        words: uint16.
        place: Where the stream begins and one behind its last word (at least `LANES * STATE_WORDS` behind the begin, at most `words.size`),
            rows (tokens), symbols of a row (width), binary logarithm of the entries of one table.
        columns: uint8 `[width]`: which table each column has.
        slot_symbol: uint8, of each (table, slot).
        start_and_frequency: uint32, of each (table, symbol).
        symbols: uint8 `[tokens * width]`, written.
        states: uint32 `[LANES]`, scratch.

    Returns:
        0 when the words were exactly those of an encoder, else 1.
    """
    begin, end, tokens, width, stride_bits = place
    at = uint64(begin)
    for lane in range(LANES):
        states[lane] = (uint32(words[at]) << uint32(WORD_BITS)) | uint32(words[at + uint64(1)])
        at += uint64(2)
    last = uint64(end - 1)
    index = uint64(0)
    for _ in range(tokens):
        for column in range(width):
            lane = index & uint64(LANES - 1)
            state = states[lane]
            shape = uint64(columns[uint64(column)])
            slot = state & uint32((1 << PRECISION_BITS) - 1)
            symbol = slot_symbol[(shape << uint64(PRECISION_BITS)) | uint64(slot)]
            entry = start_and_frequency[(shape << uint64(stride_bits)) | uint64(symbol)]
            symbols[index] = uint8(symbol)
            state = (entry & uint32(0xFFFF)) * (state >> uint32(PRECISION_BITS)) + slot - (entry >> uint32(16))
            is_empty = uint64(state < uint32(LOWEST_STATE))
            refilled = (state << uint32(WORD_BITS)) | uint32(words[min(at, last)])
            states[lane] = refilled if is_empty else state
            at += is_empty
            index += uint64(1)
    status = uint64(at != uint64(end))
    for lane in range(LANES):
        status |= uint64(states[lane] != uint32(LOWEST_STATE))
    return status
