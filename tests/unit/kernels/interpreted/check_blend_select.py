"""`blend_select`: the kernels against the references."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_kernels.blend_select import blend_deviation_reference, blend_select_reference
from lmcache_kernels.blend_select.kernel import launch_deviation, launch_select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (3, 1030), (0, 4)])
def test_deviation(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    fresh, retrieved = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    is_valid = (torch.rand(shape[0], generator=generator) < 0.7).to(DEVICE)
    retrieved[~is_valid] = torch.nan  # memory that means nothing
    ours = torch.full((shape[0],), 7.0, device=DEVICE)
    launch_deviation(fresh, retrieved, is_valid, ours)
    torch.testing.assert_close(ours, blend_deviation_reference(fresh, retrieved, is_valid))


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    num_tokens = sum(lengths)
    values = st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.0, 3e30, float("inf"), float("nan")])
    deviation = torch.tensor(draw(st.lists(values, min_size=num_tokens, max_size=num_tokens)), dtype=torch.float32)
    is_valid = torch.tensor(draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), dtype=torch.bool)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    counts = [draw(st.integers(0, int(is_valid[start:end].sum()))) for start, end in pairwise(starts)]
    return deviation.to(DEVICE), is_valid.to(DEVICE), starts, counts, draw(st.integers(0, 3))


@settings(max_examples=12, deadline=None)
@given(batches())
def test_choice(batch):
    deviation, is_valid, *numbers = batch
    ours = torch.zeros(len(deviation), dtype=torch.bool, device=DEVICE)
    launch_select(deviation, is_valid, *numbers, ours)
    assert torch.equal(ours, blend_select_reference(deviation, is_valid, *numbers))


def test_choice_over_several_blocks():
    generator = torch.Generator().manual_seed(1)
    deviation = torch.randint(0, 50, (2500,), generator=generator).float().to(DEVICE)
    is_valid = (torch.rand(2500, generator=generator) < 0.9).to(DEVICE)
    ours = torch.zeros(2500, dtype=torch.bool, device=DEVICE)
    launch_select(deviation, is_valid, [0, 2500], [700], 1, ours)
    assert torch.equal(ours, blend_select_reference(deviation, is_valid, [0, 2500], [700], 1))
