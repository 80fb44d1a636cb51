"""The ops of blending on a CPU: what they refuse, and their references against plain words."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_kernels import KernelInputError
from lmcache_kernels.blend_select import blend_deviation, blend_select
from lmcache_kernels.rope_rotate import Rotation, rope_rotate

NAN, INF = math.nan, math.inf
TRUE = torch.ones(6, dtype=torch.bool)
POSITIONS = torch.zeros(3, dtype=torch.int64)
TABLE = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
K = torch.ones(3, 2, 4)


def chosen(deviation, counts, starts=None, is_valid=None, tail=0):
    is_valid = [True] * len(deviation) if is_valid is None else is_valid
    starts = [0, len(deviation)] if starts is None else starts
    made = blend_select(
        torch.tensor(deviation), torch.tensor(is_valid, dtype=torch.bool), starts, counts, tail
    )
    return made.nonzero().flatten().tolist()


def chosen_slowly(deviation, is_valid, starts, counts, tail):
    """By the words of the README."""
    found = set()
    for (start, end), count in zip(pairwise(starts), counts, strict=True):
        candidates = [t for t in range(start, end) if is_valid[t] and t < end - tail]
        by_rank = sorted(
            candidates,
            key=lambda t: (
                not math.isnan(deviation[t]),
                -deviation[t] if deviation[t] == deviation[t] else 0,
                t,
            ),
        )
        found |= set(range(start, end)) - set(candidates) | set(by_rank[:count])
        found |= {t for t in candidates if not math.isfinite(deviation[t])}
    return sorted(found)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_choice_is_that_of_the_readme(data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    values = st.sampled_from([0.0, -0.0, 1e-45, 0.5, 1.0, 3e38, INF, NAN, -NAN])
    deviation = data.draw(st.lists(values, min_size=sum(lengths), max_size=sum(lengths)))
    is_valid = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    counts, tail = (
        [data.draw(st.integers(0, length)) for length in lengths],
        data.draw(st.integers(0, 3)),
    )
    assert chosen(deviation, counts, starts, is_valid, tail) == chosen_slowly(
        deviation, is_valid, starts, counts, tail
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_damaged_rows_are_chosen(dtype):
    fresh = torch.zeros(6, 4, dtype=dtype)
    retrieved = fresh.clone()
    # The difference of infinities is no number, and negative on many processors.
    fresh[1, 0] = retrieved[1, 0] = INF
    retrieved[3, 2], retrieved[4] = -NAN, 1.0
    deviation = blend_deviation(fresh, retrieved, TRUE)
    assert blend_select(deviation, TRUE, [0, 6], [0], 0).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deviations_are_summed_in_float32(dtype):
    fresh = torch.full((1, 4096), 0.75, dtype=dtype)
    assert blend_deviation(fresh, torch.zeros_like(fresh), TRUE[:1]).tolist() == [4096 * 0.5625]
    fresh.fill_(300.0)
    assert blend_deviation(fresh, torch.zeros_like(fresh), TRUE[:1]).tolist() == [4096 * 90000.0]


@pytest.mark.parametrize("shape", [(0, 4), (6, 0)])
def test_nothing_deviates_by_nothing(shape):
    empty = torch.zeros(shape)
    assert blend_deviation(empty, empty, TRUE[: shape[0]]).tolist() == [0.0] * shape[0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fresh": torch.zeros(6, 4, dtype=torch.float64)}, "float64"),
        ({"fresh": torch.zeros(6, 2, 2)}, "6, 2, 2"),
        ({"fresh": torch.zeros(4, 6).T}, "contiguous"),
        ({"retrieved": torch.zeros(6, 5)}, "6, 5"),
        ({"retrieved": torch.zeros(6, 4, dtype=torch.float16)}, "float16"),
        ({"retrieved": torch.zeros(6, 4, device="meta")}, "meta"),
        ({"retrieved": torch.zeros(4, 6).T}, "retrieved"),
        ({"is_valid": TRUE[:5]}, "is_valid"),
        ({"is_valid": TRUE.to(torch.uint8)}, "uint8"),
        ({"is_valid": TRUE.to("meta")}, "meta"),
        ({"is_valid": torch.ones(12, dtype=torch.bool)[::2]}, "contiguous"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changed, words):
    given = {"fresh": torch.zeros(6, 4), "retrieved": torch.zeros(6, 4), "is_valid": TRUE} | changed
    with pytest.raises(KernelInputError, match=words):
        blend_deviation(**given)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"deviation": torch.zeros(6, dtype=torch.float64)}, "float64"),
        ({"deviation": torch.zeros(6, 1)}, "6, 1"),
        ({"deviation": torch.zeros(12)[::2]}, "contiguous"),
        ({"is_valid": TRUE[:5]}, "is_valid"),
        ({"starts": []}, "starts"),
        ({"starts": [1, 3, 6]}, r"\[1, 3, 6\]"),
        ({"starts": [0, 3, 5]}, r"\[0, 3, 5\]"),
        ({"starts": [0, 7, 6]}, r"\[0, 7, 6\]"),
        ({"counts": [1]}, "1 counts"),
        ({"counts": [1, 4]}, r"\[1, 4\]"),
        ({"counts": [-1, 1]}, r"\[-1, 1\]"),
        ({"num_tail_tokens": -1}, "-1 at their ends"),
    ],
)
def test_choices_that_do_not_fit_are_refused(changed, words):
    given = {
        "deviation": torch.zeros(6),
        "is_valid": TRUE,
        "starts": [0, 3, 6],
        "counts": [1, 1],
        "num_tail_tokens": 1,
    } | changed
    with pytest.raises(KernelInputError, match=words):
        blend_select(**given)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"source": POSITIONS.int()}, "source positions: torch.int32"),
        ({"target": torch.zeros(6, dtype=torch.int64)[::2]}, "target positions"),
        ({"target": POSITIONS[:2]}, "3 source and 2 target"),
        ({"source": POSITIONS - 1}, "from -1 to -1; the table has 1"),
        ({"target": POSITIONS + 1}, "from 1 to 1; the table has 1"),
        ({"source_table": TABLE.double()}, "float64"),
        ({"target_table": TABLE[0]}, "target table"),
        ({"source_table": torch.zeros(1, 3)}, "even"),
        ({"source_table": torch.zeros(1, 0), "target_table": torch.zeros(1, 0)}, "at least 2"),
        ({"target_table": torch.zeros(1, 6)}, "4 and 6"),
        ({"source_table": torch.zeros(4, 2).T}, "contiguous"),
        ({"target": POSITIONS.to("meta")}, "target positions.* on meta"),
        ({"target_table": TABLE.to("meta")}, "target table.* on meta"),
    ],
)
def test_rotations_that_do_not_fit_are_refused(changed, words):
    positions = {"source": POSITIONS, "target": POSITIONS}
    tables = {"source_table": TABLE, "target_table": TABLE}
    with pytest.raises(KernelInputError, match=words):
        Rotation(**(positions | tables | changed))


@pytest.mark.parametrize(
    ("k", "out", "words"),
    [
        (K.double(), None, "float64"),
        (K[:2], None, "2, 2, 4"),
        (K[..., :3].contiguous(), None, "at least 4"),
        (K.flatten(1), None, "3, 8"),
        (torch.ones(3, 4, 2).transpose(1, 2), None, "contiguous"),
        (K.to("meta"), None, "meta"),
        (K, torch.zeros(3, 2, 5), "3, 2, 5"),
        (K, torch.zeros(3, 2, 4, dtype=torch.float16), "float16"),
        (K, torch.zeros(3, 2, 4, device="meta"), "meta"),
        (K, torch.zeros(3, 4, 2).transpose(1, 2), "contiguous"),
    ],
)
def test_k_that_does_not_fit_is_refused(k, out, words):
    with pytest.raises(KernelInputError, match=words):
        rope_rotate(k, Rotation(POSITIONS, POSITIONS, TABLE, TABLE), out)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_out_is_k_or_somewhere_else(first, second):
    rotation, pool = Rotation(POSITIONS, POSITIONS, TABLE, TABLE), torch.arange(56.0).view(7, 2, 4)
    before = pool.clone()
    with pytest.raises(KernelInputError, match="overlaps a part of K"):
        rope_rotate(pool[first : first + 3], rotation, pool[second : second + 3])
    assert torch.equal(pool, before)
    assert rope_rotate(pool[:3], rotation, pool[3:6]) is not None
    assert torch.equal(pool[3:6], before[:3])
    empty = Rotation(POSITIONS[:0], POSITIONS[:0], TABLE, TABLE)
    assert rope_rotate(pool[:0], empty, pool[3:3]).shape == (0, 2, 4)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("far", [0, 1_500_000])
def test_k_is_turned_by_the_distance(far, is_interleaved):
    """Against complex numbers of 128 bits, also where the angles are a million radians."""
    num_tokens, num_pairs = 5, 3
    generator = torch.Generator().manual_seed(far)
    k = torch.randn(num_tokens, 2, 8, generator=generator)
    source, target = (
        far * i + torch.randint(0, 40, (num_tokens,), generator=generator) for i in range(2)
    )
    frequencies = 1e4 ** -(torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    tables, rows = [], []
    for positions in (source, target):
        known, row = positions.unique(return_inverse=True)
        angles = known[:, None] * frequencies
        tables.append(torch.cat([angles.cos(), angles.sin()], 1).float())
        rows.append(row)
    made = rope_rotate(k, Rotation(*rows, *tables, is_interleaved))
    turn = torch.polar(
        torch.ones(num_tokens, 1, num_pairs, dtype=torch.float64),
        ((target - source)[:, None] * frequencies)[:, None],
    )
    rotated = k[..., :6].double()
    pairs = (
        rotated.unflatten(-1, (num_pairs, 2))
        if is_interleaved
        else rotated.unflatten(-1, (2, num_pairs)).transpose(-1, -2)
    )
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    expected = turned.flatten(-2) if is_interleaved else turned.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(made[..., :6].double(), expected, rtol=0, atol=2e-6)
    assert torch.equal(made[..., 6:], k[..., 6:])
