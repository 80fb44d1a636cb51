"""Probability tables: their bits, which no machine changes, and their id."""

from __future__ import annotations

import numpy as np
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.serde.tables import LEVELS, TOTAL, TableSet, bell_curves, flattened, reciprocals


def test_other_tables_have_another_id() -> None:
    other = {levels: bell_curves().of(levels).frequencies.copy() for levels in LEVELS}
    other[7][3, 7] -= 1
    other[7][3, 8] += 1
    assert TableSet(other).id != bell_curves().id
    assert TableSet(dict(reversed(other.items()))).id == TableSet(other).id


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
        last = (1 << 31) - 1
        before = max(last // frequency * frequency - 1, 0)
        ends = np.array([0, 1, last - 1, last, before], np.uint64)
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
