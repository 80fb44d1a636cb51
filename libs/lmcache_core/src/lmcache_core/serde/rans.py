"""Interleaved rANS: the loops that turn symbols into 16-bit words and back. Compiled by `compiled`;
`docs/codec.md` is the specification.

A section (some columns of a plane, all its rows) is coded by `LANES` coders in turn: its symbol i,
row by row, belongs to lane `i % LANES`. The stream begins with the final state of each lane (two
words, upper half first) followed by the words in the order in which a decoder needs them.
Encoding runs backwards.

Source: Duda, arXiv:1311.2540; Giesen, "Interleaved entropy coders", arXiv:1402.3392.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, uint8, uint16, uint32, uint64
from numba.extending import register_jitable

from lmcache_core.serde.tables import LANES, PRECISION_BITS

LOWEST_STATE = 1 << 15
"""Between symbols a state is in `LOWEST_STATE … 2^31 - 1`."""
WORD_BITS = 16

ENCODE_SIGNATURE = (
    "int64(uint8[::1], UniTuple(int64, 4), uint8[::1], uint32[:, ::1], uint16[::1], int64[::1])"
)
DECODE_SIGNATURE = (
    "int64(Array(uint16, 1, 'C', readonly=True), UniTuple(int64, 5), int64[::1], uint8[::1],"
    " uint8[::1], uint32[::1], uint8[::1])"
)


@register_jitable
def _push(states: Any, lane: Any, tables: Any, entry: Any, words: Any, at: Any) -> Any:
    """Encode one symbol with one lane; return the position of its word, one before `at`, or `at` if
    it has none.
    """
    state = uint64(states[lane])
    count = uint64(tables[entry, 0])
    words[at - uint64(1)] = uint16(state)
    is_full = state >= (count << uint64(31 - PRECISION_BITS))
    at = at - uint64(1) if is_full else at
    state = state >> uint64(WORD_BITS) if is_full else state
    quotient = (state * uint64(tables[entry, 2])) >> uint64(tables[entry, 3])
    states[lane] = uint32(
        state + uint64(tables[entry, 1]) + quotient * (uint64(1 << PRECISION_BITS) - count)
    )
    return at


def encode_sections(
    symbols: Any,
    shape: tuple[int, int, int, int],
    columns: Any,
    tables: Any,
    words: Any,
    lengths: Any,
) -> Any:
    """Encode a plane of symbols, section by section.

    Args:
        symbols: uint8 `[tokens * channels]`.
        shape: Rows (tokens), symbols of a row (channels), columns of a section, entries of one
            table (stride).
        columns: uint8 `[channels]`: table of each column; it has a frequency for every symbol.
        tables: uint32 `[entries, 4]`: for each (table, symbol) the frequency, its first slot, the
            reciprocal and its shift.
        words: uint16, filled from its end; at least `max_words` of every section.
        lengths: int64 `[sections]`, written: number of words of each section.

    Returns:
        Index in `words` of the first section's stream; the others follow, and the last one ends
            with `words`.
    """
    tokens, channels, section, stride = shape
    states = np.empty(LANES, np.uint32)
    bases = columns.astype(np.uint32) * uint32(stride)
    at = uint64(words.size)
    for number in range(lengths.size - 1, -1, -1):
        first = uint64(number * section)
        width = min(uint64(section), uint64(channels) - first)
        end = at
        for lane in range(LANES):
            states[lane] = uint32(LOWEST_STATE)
        index = uint64(tokens) * width
        row = uint64(tokens) * uint64(channels) + first
        whole_turns = width & uint64(LANES - 1) == uint64(0)
        for _ in range(tokens):
            row -= uint64(channels)
            column = width
            while whole_turns and column > uint64(
                0
            ):  # the order of the lanes is fixed under the columns: the compiler unrolls a round
                column -= uint64(LANES)
                for back in range(LANES):
                    lane = uint64(LANES - 1 - back)
                    entry = uint64(bases[first + column + lane]) + uint64(
                        symbols[row + column + lane]
                    )
                    at = _push(states, lane, tables, entry, words, at)
            while column > uint64(0):
                column -= uint64(1)
                index -= uint64(1)
                entry = uint64(bases[first + column]) + uint64(symbols[row + column])
                at = _push(states, index & uint64(LANES - 1), tables, entry, words, at)
        for back in range(LANES):
            state = states[LANES - 1 - back]
            at -= uint64(2)
            words[at] = uint16(state >> uint32(WORD_BITS))
            words[at + uint64(1)] = uint16(state)
        lengths[number] = int64(end - at)
    return int64(at)


def decode_sections(
    words: Any,
    place: tuple[int, int, int, int, int],
    lengths: Any,
    columns: Any,
    slot_symbol: Any,
    start_and_frequency: Any,
    symbols: Any,
) -> Any:
    """Decode a plane of symbols. Any words result in some symbols: nothing outside the arrays is
    read or written.

    Args:
        words: uint16.
        place: Index of the first section's stream, rows (tokens), symbols of a row (channels),
            columns of a section, binary logarithm of the entries of one table.
        lengths: int64 `[sections]`: number of words of each section, each at least `LANES *
            STATE_WORDS`; none ends past `words`.
        columns: uint8 `[channels]`: table of each column.
        slot_symbol: uint8, for each (table, slot).
        start_and_frequency: uint32, for each (table, symbol).
        symbols: uint8 `[tokens * channels]`, written.

    Returns:
        0 if the words are a valid encoding, else another number.
    """
    begin, tokens, channels, section, stride_bits = place
    states = np.empty(LANES, np.uint32)
    status = uint64(0)
    at = uint64(begin)
    for number in range(lengths.size):
        end = at + uint64(lengths[number])
        first = uint64(number * section)
        width = min(uint64(section), uint64(channels) - first)
        for lane in range(LANES):
            states[lane] = (uint32(words[at]) << uint32(WORD_BITS)) | uint32(words[at + uint64(1)])
            at += uint64(2)
        last = end - uint64(1)
        index = uint64(0)
        row = first
        for _ in range(tokens):
            for column in range(width):
                lane = index & uint64(LANES - 1)
                state = states[lane]
                shape = uint64(columns[first + uint64(column)])
                slot = state & uint32((1 << PRECISION_BITS) - 1)
                symbol = slot_symbol[(shape << uint64(PRECISION_BITS)) | uint64(slot)]
                entry = start_and_frequency[(shape << uint64(stride_bits)) | uint64(symbol)]
                symbols[row + uint64(column)] = uint8(symbol)
                state = (
                    (entry & uint32(0xFFFF)) * (state >> uint32(PRECISION_BITS))
                    + slot
                    - (entry >> uint32(16))
                )
                is_empty = uint64(state < uint32(LOWEST_STATE))
                refilled = (state << uint32(WORD_BITS)) | uint32(words[min(at, last)])
                states[lane] = refilled if is_empty else state
                at += is_empty
                index += uint64(1)
            row += uint64(channels)
        status |= uint64(at != end)
        for lane in range(LANES):
            status |= uint64(states[lane] != uint32(LOWEST_STATE))
        at = end
    return int64(status)
