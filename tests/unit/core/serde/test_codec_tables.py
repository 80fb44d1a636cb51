"""Probability tables: sums, shapes, and bits that no machine changes."""

from __future__ import annotations

import _pydecimal
import hashlib
import json
import math
from decimal import Context
from pathlib import Path

import numpy as np
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.serde import tables
from lmcache_core.serde.tables import (
    LEVELS,
    NUM_SHAPES,
    NUM_WIDTHS,
    TOTAL,
    VARIANCE_UNIT,
    TableSet,
    bell_curves,
    flattened,
    reciprocals,
)

GOLDEN = json.loads(
    (Path(__file__).parents[3] / "contract/golden/codec.json").read_text(encoding="utf-8")
)["tables"]


def test_their_id_is_the_one_that_records_carry() -> None:
    assert bell_curves().id == GOLDEN["id"]
    assert bell_curves().levels == LEVELS == tuple(GOLDEN["levels"])


@pytest.mark.parametrize("levels", LEVELS)
def test_their_frequencies_are_pinned(levels: int) -> None:
    digest = hashlib.sha256(
        bell_curves().of(levels).frequencies.astype("<u2").tobytes()
    ).hexdigest()
    assert digest == GOLDEN["frequencies"][str(levels)]


def test_the_id_is_of_what_they_hold() -> None:
    canonical = hashlib.sha256(b"lmcache codec tables 1")
    for levels in LEVELS:
        for number in (levels, NUM_SHAPES, 2 * levels + 1):
            canonical.update(number.to_bytes(2, "little"))
        for row in bell_curves().of(levels).frequencies.tolist():
            canonical.update(b"".join(number.to_bytes(2, "little") for number in row))
    assert bell_curves().id == canonical.hexdigest()[:16]
    other = {levels: bell_curves().of(levels).frequencies.copy() for levels in LEVELS}
    other[7][3, 7] -= 1
    other[7][3, 8] += 1
    assert TableSet(other).id != bell_curves().id
    assert TableSet(dict(reversed(other.items()))).id == TableSet(other).id


def test_more_digits_and_another_arithmetic_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own decimal arithmetic, without the C library and with 40 digits: nothing lies so
    near a whole number that it matters.
    """
    expected = {levels: bell_curves().of(levels).frequencies for levels in (1, 7, 15)}
    monkeypatch.setattr(tables, "_CONTEXT", Context(prec=60))
    for levels in LEVELS:
        np.testing.assert_array_equal(
            tables._bell_rows(levels), bell_curves().of(levels).frequencies
        )
    monkeypatch.setattr(tables, "Decimal", _pydecimal.Decimal)
    monkeypatch.setattr(tables, "_CONTEXT", _pydecimal.Context(prec=40))
    for name in ("_NARROWEST", "_WIDEST_SHARE", "_WIDEST"):
        monkeypatch.setattr(tables, name, _pydecimal.Decimal(str(getattr(tables, name))))
    for levels, rows in expected.items():
        np.testing.assert_array_equal(tables._bell_rows(levels), rows)


@pytest.mark.parametrize("levels", LEVELS)
def test_they_are_bell_curves(levels: int) -> None:
    frequencies = bell_curves().of(levels).frequencies
    widest = min(48.0, 0.75 * levels)
    assert frequencies.shape == (NUM_SHAPES, 2 * levels + 1)
    assert (frequencies.sum(1) == TOTAL).all()
    assert (frequencies == frequencies[:, ::-1]).all()
    assert (frequencies[1::2] > 0).all()
    for i in range(NUM_WIDTHS):
        width = 0.2 * (widest / 0.2) ** (i / (NUM_WIDTHS - 1))
        for shape, support in ((2 * i, min(levels, int(4 * width) + 1)), (2 * i + 1, levels)):
            row = frequencies[shape].tolist()
            density = {
                symbol: math.exp(-symbol * symbol / (2 * width * width))
                for symbol in range(-support, support + 1)
            }
            spare = TOTAL - (2 * support + 1)
            for symbol in range(-levels, levels + 1):
                ideal = (
                    1 + spare * density[symbol] / sum(density.values()) if symbol in density else 0
                )
                slack = 2 * support + 2 if symbol == 0 else 1
                assert abs(row[symbol + levels] - ideal) <= slack, (shape, symbol)


@pytest.mark.parametrize("levels", LEVELS)
def test_the_forms_for_the_loops_say_the_same(levels: int) -> None:
    of_levels = bell_curves().of(levels)
    stride = of_levels.stride
    assert stride == 1 << (2 * levels).bit_length()
    slots = of_levels.slot_symbol.reshape(NUM_SHAPES, TOTAL)
    entries = of_levels.start_and_frequency.reshape(NUM_SHAPES, stride)
    coder = of_levels.coder.reshape(NUM_SHAPES, stride, 4)
    for shape in range(NUM_SHAPES):
        start = 0
        for symbol, frequency in enumerate(of_levels.frequencies[shape].tolist()):
            assert (slots[shape, start : start + frequency] == symbol).all()
            assert int(entries[shape, symbol]) == start << 16 | frequency
            assert coder[shape, symbol, :2].tolist() == [frequency, start]
            start += frequency
        assert start == TOTAL
        assert not (entries[shape, 2 * levels + 1 :] & 0xFFFF).any()


@pytest.mark.parametrize("levels", LEVELS)
def test_widths_are_told_apart_by_variance(levels: int) -> None:
    of_levels = bell_curves().of(levels)
    bounds, reach = of_levels.choice.tolist()
    assert len(bounds) == len(reach) == NUM_WIDTHS
    assert bounds[-1] == np.iinfo(np.int64).max
    assert bounds == sorted(bounds)
    for i, row in enumerate(of_levels.frequencies[0::2].tolist()):
        assert reach[i] == max(symbol for symbol in range(levels + 1) if row[levels + symbol])
        variance = (
            sum(number * (symbol - levels) ** 2 for symbol, number in enumerate(row))
            * VARIANCE_UNIT
            // TOTAL
        )
        assert variance <= bounds[i]
        assert i == 0 or variance >= bounds[i - 1]


def test_reciprocals_divide_every_state() -> None:
    """Quotients change at multiples of the frequency: there, next to them, at both ends and
    anywhere.
    """
    rng = np.random.default_rng(0)
    frequencies = np.arange(TOTAL + 1)
    multipliers, shifts = reciprocals(frequencies)
    assert (multipliers[0], shifts[0]) == (0, 0)
    for frequency in range(1, TOTAL + 1):
        quotients = rng.integers(0, ((1 << 31) - 1) // frequency + 1, 200, np.uint64)
        ends = np.array(
            [
                0,
                1,
                (1 << 31) - 1,
                (1 << 31) - 2,
                ((1 << 31) - 1) // frequency * frequency - 1 & (1 << 31) - 1,
            ],
            np.uint64,
        )
        multiples = quotients * np.uint64(frequency)
        states = np.concatenate([multiples, multiples + np.uint64(frequency - 1), ends])
        states = states[states < 1 << 31]
        divided = (states * np.uint64(multipliers[frequency])) >> np.uint64(shifts[frequency])
        np.testing.assert_array_equal(divided, states // np.uint64(frequency))


def test_tables_that_cannot_code_are_refused() -> None:
    rows = bell_curves().of(3).frequencies
    for shape, at, change in ((0, 3, 1), (1, 0, -int(rows[1, 0])), (2, 0, -1)):
        damaged = rows.copy()
        damaged[shape, at] += change
        with pytest.raises(SerdeError, match="tables for 3 levels"):
            flattened(3, damaged)
    shifted = rows.copy()
    shifted[1, 3] += shifted[1, 0]
    shifted[1, 0] = 0
    with pytest.raises(SerdeError, match="every symbol some room"):
        flattened(3, shifted)
    with pytest.raises(SerdeError, match="tables for 3 levels"):
        flattened(3, rows[:-1])
    with pytest.raises(SerdeError, match="no tables for 5 levels"):
        bell_curves().of(5)
