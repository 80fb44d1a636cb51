"""The model of quantised values: shift, delta and table of each group, and the symbols, against
Python's whole numbers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lmcache_core.serde.blob import next_power_of_two
from lmcache_core.serde.machine_code import load_loops
from lmcache_core.serde.plane_layout import MAX_TOKENS, PlaneLayout
from lmcache_core.serde.symbols import NUM_SUMS
from lmcache_core.serde.tables import DELTA_FLAG, LEVELS, MAX_LEVELS, bell_curves

from tests.fixtures import codec_reference
from tests.fixtures.codec_reference import Chosen

Array = npt.NDArray[Any]


def choose(whole: Array, levels: int, group: int, wraps: bool) -> Chosen:
    tokens, channels = whole.shape
    num_groups = -(-channels // group)
    shifts, shapes = np.full(num_groups, 0x5A5A, np.int16), np.full(num_groups, 0xA5, np.uint8)
    sums, symbols = np.full((NUM_SUMS, channels), -1, np.int32), np.full(whole.size, 0xA5, np.uint8)
    given = whole.astype(np.int16).ravel()
    load_loops().choose(
        given,
        (tokens, channels, group, levels, int(wraps)),
        bell_curves().of(levels).choice,
        shifts,
        shapes,
        sums,
        symbols,
    )
    deltas = [bool(shape & DELTA_FLAG) for shape in shapes.tolist()]
    centred = symbols.reshape(whole.shape).astype(np.int64) - levels
    return Chosen(
        shifts.tolist(), deltas, [shape & ~DELTA_FLAG for shape in shapes.tolist()], centred
    )


def check(whole: Array, levels: int, group: int, wraps: bool) -> Chosen:
    found = choose(whole, levels, group, wraps)
    expected = codec_reference.choose(
        whole, levels, group, wraps, bell_curves().of(levels).frequencies
    )
    assert (found.shifts, found.deltas, found.shapes) == (
        expected.shifts,
        expected.deltas,
        expected.shapes,
    )
    np.testing.assert_array_equal(found.symbols, expected.symbols)
    return found


def wandering(rng: np.random.Generator, tokens: int, channels: int, levels: int) -> Array:
    """Values of which some channels stay about a mean and others walk, each as far as it likes
    within the levels.
    """
    width = rng.uniform(0, levels, channels)
    still = rng.normal(rng.uniform(-levels, levels, channels), width, (tokens, channels))
    walk = np.cumsum(rng.normal(0, width / 8 + 0.1, (tokens, channels)), 0)
    return np.clip(
        np.rint(np.where(rng.random(channels) < 0.5, still, walk)), -levels, levels
    ).astype(np.int64)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 64, 129])
def test_it_is_as_written(levels: int, tokens: int) -> None:
    for seed, channels in enumerate((1, 5, 70)):
        whole = wandering(
            np.random.default_rng(levels * 1000 + tokens * 10 + seed), tokens, channels, levels
        )
        group = PlaneLayout(1, tokens, channels).group
        assert group == next_power_of_two(-(-64 // tokens))
        check(whole, levels, group, True)
        check(whole, levels, 1, True)


def test_deltas_are_coded_where_they_are_smaller_and_nowhere_else() -> None:
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.integers(-1, 2, (200, 40)), 0) % 15 - 7
    still = rng.integers(-3, 4, (200, 40))
    found = check(np.concatenate([walk, still], 1), 7, 1, True)
    assert found.deltas == [True] * 40 + [False] * 40


SIXTEEN_ONES = [0, 1, 1, 0, -1, -1] * 4
TWO_OF_THEM_JOINED = [0, 1, 1, 0, -1, -1] * 3 + [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("column", "is_delta"), [(SIXTEEN_ONES, False), (TWO_OF_THEM_JOINED, True)]
)
def test_what_deltas_gain_must_be_more_than_a_sixteenth(column: list[int], is_delta: bool) -> None:
    """Squares that sum to 16, and squares of deltas that sum to 15, or to 14."""
    found = check(np.array([column]).T, 7, 1, True)
    assert (found.shifts, found.deltas) == ([0], [is_delta])
    deltas = [now - before for before, now in pairwise([0, *column])]
    assert sum(value * value for value in column) == 16
    assert sum(value * value for value in deltas) == 15 - is_delta


@pytest.mark.parametrize(
    ("column", "shift"),
    [([1, 2], 2), ([-1, -2], -1), ([0, 1], 1), ([0, -1], 0), ([1, 1, 2], 1), ([7, 7], 7)],
)
def test_means_are_rounded_halves_up(column: list[int], shift: int) -> None:
    assert check(np.array([column]).T, 7, 1, True).shifts == [shift]


def test_values_wrap_around() -> None:
    """The mean is 5: -7 is 12 below it, which is 3 above it, modulo 15, and 1 above the value
    before.
    """
    found = check(np.array([[7, 7, 7, 7, 7, 7, -7]]).T, 7, 1, True)
    assert (found.shifts, found.deltas) == ([5], [True])
    assert found.symbols[:, 0].tolist() == [2, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("seed", range(6))
def test_a_shift_moves_until_every_value_has_a_symbol(seed: int) -> None:
    """Without wrapping: values of a channel that span 254 steps about any middle, most of them
    at one end.
    """
    rng = np.random.default_rng(seed)
    columns = []
    for _ in range(20):
        low = int(rng.integers(-32000, 31000))
        ends = rng.choice([low, low + 254], 80, p=[0.95, 0.05])
        ends[:2] = low, low + 254
        columns.append(ends)
    found = check(np.array(columns).T, MAX_LEVELS, 1, False)
    assert all(
        shift - 127 == column.min() for shift, column in zip(found.shifts, columns, strict=True)
    )


def test_the_longest_columns_of_the_largest_values_do_not_overflow() -> None:
    ends = np.where(np.arange(MAX_TOKENS) % 2, 127, -127)[:, None]
    check(np.concatenate([ends, -ends, abs(ends)], 1), MAX_LEVELS, 1, True)
    check(np.full((MAX_TOKENS, 2), -32700) + 100 * (ends > 0), MAX_LEVELS, 1, False)


@pytest.mark.parametrize("levels", LEVELS)
def test_every_shape_can_be_chosen_and_holds_its_symbols(levels: int) -> None:
    """Columns of all widths, with and without one value far out."""
    tables = bell_curves().of(levels)
    seen = set()
    for width in np.geomspace(0.05, 2 * levels, 60):
        column = np.clip(
            np.rint(np.random.default_rng(1).normal(0, width, 300)), -levels, levels
        ).astype(np.int64)
        for far in (0, levels):
            column[150] = far or column[150]
            found = choose(column[:, None], levels, 1, True)
            assert (tables.frequencies[found.shapes[0]][found.symbols[:, 0] + levels] > 0).all()
            seen.add(found.shapes[0])
    assert len(seen) > min(levels, 15)
    assert levels < 7 or {shape % 2 for shape in seen} == {0, 1}


def test_more_channels_than_are_worked_on_at_a_time() -> None:
    for channels in (511, 512, 513, 1025):
        check(wandering(np.random.default_rng(channels), 3, channels, 7), 7, 32, True)
