"""Interleaved rANS: the same words as a coder on Python's whole numbers, and a decoder that
stays within its arrays whatever it reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lmcache_core.serde import rans
from lmcache_core.serde.machine_code import load_loops
from lmcache_core.serde.tables import (
    LANES,
    LEVELS,
    NUM_SHAPES,
    PRECISION_BITS,
    STATE_WORDS,
    TOTAL,
    ShapeTables,
    bell_curves,
    max_words,
)

from tests.fixtures import codec_reference

Array = npt.NDArray[Any]


def encode(
    symbols: Array, columns: Array, section: int, tables: ShapeTables
) -> tuple[Array, Array]:
    """The words and how many each section has, as the compiled loop makes them."""
    tokens, channels = symbols.shape
    lengths = np.full(-(-channels // section), -1, np.int64)
    room = sum(
        max_words(tokens * min(section, channels - first)) for first in range(0, channels, section)
    )
    words = np.full(room, 0xA5A5, np.uint16)
    sections = tokens, channels, section, tables.stride
    start = load_loops().encode_sections(
        symbols.astype(np.uint8).ravel(),
        sections,
        columns.astype(np.uint8),
        tables.coder,
        words,
        lengths,
    )
    assert room - start == lengths.sum()
    return words[start:], lengths


def decode(
    words: Array,
    lengths: Array,
    shape: tuple[int, int],
    columns: Array,
    section: int,
    tables: ShapeTables,
) -> tuple[int, Array]:
    """Status and symbols, decoded between guards."""
    memory = np.full(64 + shape[0] * shape[1] + 64, 0xA5, np.uint8)
    symbols = memory[64:-64]
    place = 0, *shape, section, tables.stride.bit_length() - 1
    given = words.copy()
    given.setflags(write=False)
    status = load_loops().decode_sections(
        given,
        place,
        lengths,
        columns.astype(np.uint8),
        tables.slot_symbol,
        tables.start_and_frequency,
        symbols,
    )
    assert (memory[:64] == 0xA5).all()
    assert (memory[-64:] == 0xA5).all()
    return status, symbols.reshape(shape)


def drawn(
    rng: np.random.Generator, shape: tuple[int, int], tables: ShapeTables
) -> tuple[Array, Array]:
    """Symbols drawn from the tables of their columns, and which tables these are; rare symbols
    are drawn more often.
    """
    columns = rng.integers(0, NUM_SHAPES, shape[1])
    flat = (tables.frequencies[columns] > 0).astype(np.float64)
    chances = tables.frequencies[columns] / TOTAL * 0.9 + flat / flat.sum(1, keepdims=True) * 0.1
    symbols = [
        rng.choice(chances.shape[1], shape[0], p=chance / chance.sum()) for chance in chances
    ]
    return np.array(symbols).T, columns


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    ("shape", "section"), [((1, 1), 1), ((3, 5), 5), ((7, 31), 10), ((40, 33), 32), ((2, 200), 128)]
)
def test_words_are_those_of_big_numbers(levels: int, shape: tuple[int, int], section: int) -> None:
    tables = bell_curves().of(levels)
    symbols, columns = drawn(np.random.default_rng(levels), shape, tables)
    words, lengths = encode(symbols, columns, section, tables)
    expected = [
        codec_reference.encoded_section(
            symbols[:, first : first + section],
            columns[first : first + section].tolist(),
            tables.frequencies,
        )
        for first in range(0, shape[1], section)
    ]
    assert lengths.tolist() == [len(part) for part in expected]
    assert words.tolist() == [word for part in expected for word in part]
    status, found = decode(words, lengths, shape, columns, section, tables)
    assert status == 0
    np.testing.assert_array_equal(found, symbols)


@pytest.mark.parametrize("levels", LEVELS)
def test_the_rarest_and_the_most_frequent_symbols_come_back(levels: int) -> None:
    """Every symbol of every table, over and over, in rows as long as lanes are many, so that one
    lane has one symbol.
    """
    tables = bell_curves().of(levels)
    for shape in range(NUM_SHAPES):
        present = np.flatnonzero(tables.frequencies[shape])
        columns = np.full(LANES, shape)
        for symbols in (
            np.repeat(present, 2)[:, None] + np.zeros((1, LANES), int),
            np.resize(present, (70, LANES)),
        ):
            words, lengths = encode(symbols, columns, LANES, tables)
            assert lengths[0] <= max_words(symbols.size)
            status, found = decode(words, lengths, symbols.shape, columns, LANES, tables)
            assert status == 0
            np.testing.assert_array_equal(found, symbols)


def test_streams_are_as_short_as_the_tables_promise() -> None:
    """Within a thousandth of the entropy, and the states."""
    tables = bell_curves().of(15)
    shape = 29
    chances = tables.frequencies[shape] / TOTAL
    symbols = np.random.default_rng(0).choice(31, (3000, 128), p=chances)
    words, _ = encode(symbols, np.full(128, shape), 128, tables)
    bits = -np.log2(chances[symbols]).sum()
    assert bits < 16 * len(words) < 1.001 * bits + 16 * LANES * STATE_WORDS


@pytest.mark.parametrize("change", ["flip", "word", "shorter", "longer", "zero", "ones"])
def test_damage_is_noticed_or_gives_some_symbols(change: str) -> None:
    rng = np.random.default_rng(len(change))
    tables = bell_curves().of(7)
    symbols, columns = drawn(rng, (50, 40), tables)
    words, lengths = encode(symbols, columns, 20, tables)
    num_noticed = 0
    for _ in range(100):
        damaged, sizes = words.copy(), lengths.copy()
        at = rng.integers(0, len(words))
        if change == "flip":
            damaged[at] ^= np.uint16(1 << rng.integers(0, 16))
        elif change == "word":
            damaged[at] = rng.integers(0, 1 << 16)
        elif change == "shorter":
            damaged, sizes[1] = damaged[:-1], sizes[1] - 1
        elif change == "longer":
            damaged, sizes[1] = (
                np.append(damaged, rng.integers(0, 1 << 16, 3, np.uint16)),
                sizes[1] + 3,
            )
        else:
            damaged[at:] = 0 if change == "zero" else 0xFFFF
        status, found = decode(damaged, sizes, symbols.shape, columns, 20, tables)
        num_noticed += status != 0
        assert found.max() <= 14
        assert status != 0 or (damaged == words).all() or change != "flip"
    assert num_noticed > 90


def test_any_words_are_decoded_within_the_arrays() -> None:
    rng = np.random.default_rng(7)
    for levels in LEVELS:
        tables = bell_curves().of(levels)
        for _ in range(50):
            shape = int(rng.integers(1, 30)), int(rng.integers(1, 60))
            section = min(int(rng.integers(1, 60)), shape[1])
            shortest = LANES * STATE_WORDS
            lengths = rng.integers(shortest, shortest + 40, -(-shape[1] // section))
            words = rng.integers(0, 1 << 16, int(lengths.sum()), np.uint16)
            columns = rng.integers(0, NUM_SHAPES, shape[1])
            status, found = decode(words, lengths, shape, columns, section, tables)
            assert status != 0
            assert found.max() < tables.stride


def test_numbers_of_the_format() -> None:
    numbers = (LANES, STATE_WORDS, rans.LOWEST_STATE, rans.WORD_BITS, PRECISION_BITS)
    assert numbers == (32, 2, 1 << 15, 16, 12)
