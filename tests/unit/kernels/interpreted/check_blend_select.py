"""`blend_select`: the kernels against the references."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lmcache_kernels.blend_select import blend_deviation_reference, blend_select_reference
from lmcache_kernels.blend_select.kernel import launch_deviation, launch_select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_GUARDS = 40
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""No shrinking: interpreted, that takes minutes."""


def chosen_by_kernel(deviation, is_valid, *numbers):
    """Into poisoned memory, of which nothing else may change."""
    pool = torch.full((len(deviation) + NUM_GUARDS,), 0xA5, dtype=torch.uint8, device=DEVICE)
    launch_select(deviation, is_valid, *numbers, pool[: len(deviation)])
    assert (pool[len(deviation) :] == 0xA5).all()
    assert (pool[: len(deviation)] <= 1).all()
    return pool[: len(deviation)].view(torch.bool)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (3, 1030), (0, 4), (2, 0)])
def test_deviation(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    fresh, retrieved = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    is_valid = (torch.rand(shape[0], generator=generator) < 0.7).to(DEVICE)
    retrieved[~is_valid] = torch.nan  # memory that means nothing
    pool = torch.full((shape[0] + NUM_GUARDS,), 7.0, device=DEVICE)
    launch_deviation(fresh, retrieved, is_valid, pool[: shape[0]])
    torch.testing.assert_close(
        pool[: shape[0]], blend_deviation_reference(fresh, retrieved, is_valid)
    )
    assert (pool[shape[0] :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_no_number_is_chosen(dtype):
    fresh, is_valid = (
        torch.zeros(6, 8, dtype=dtype, device=DEVICE),
        torch.ones(6, dtype=torch.bool, device=DEVICE),
    )
    retrieved = torch.ones_like(fresh)
    retrieved[1, 3], retrieved[4, 7], is_valid[0] = torch.nan, -torch.nan, False
    ours = torch.full((6,), 7.0, device=DEVICE)
    launch_deviation(fresh, retrieved, is_valid, ours)
    assert ours.isnan().nonzero().flatten().tolist() == [1, 4]
    chosen = chosen_by_kernel(ours, is_valid, [0, 6], [0], 0)
    assert chosen.nonzero().flatten().tolist() == [0, 1, 4]


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    num_tokens = sum(lengths)
    values = st.sampled_from(
        [0.0, -0.0, 1e-30, 0.5, 1.0, 1.0, 3e30, float("inf"), float("nan"), -float("nan")]
    )
    deviation = torch.tensor(
        draw(st.lists(values, min_size=num_tokens, max_size=num_tokens)), dtype=torch.float32
    )
    is_valid = torch.tensor(
        draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), dtype=torch.bool
    )
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    counts = [draw(st.integers(0, end - start)) for start, end in pairwise(starts)]
    return deviation.to(DEVICE), is_valid.to(DEVICE), starts, counts, draw(st.integers(0, 3))


@settings(max_examples=12, deadline=None, phases=PHASES)
@given(batches())
def test_choice(batch):
    assert torch.equal(chosen_by_kernel(*batch), blend_select_reference(*batch))


def test_choice_over_several_blocks():
    generator = torch.Generator().manual_seed(1)
    deviation = torch.randint(0, 50, (2500,), generator=generator).float().to(DEVICE)
    is_valid = (torch.rand(2500, generator=generator) < 0.9).to(DEVICE)
    numbers = ([0, 1100, 2500], [700, 130], 1)
    assert torch.equal(
        chosen_by_kernel(deviation, is_valid, *numbers),
        blend_select_reference(deviation, is_valid, *numbers),
    )
