"""The Triton kernels against their torch references, bit for bit. Collected by `test_interpreted.py` only."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_addressing import MAX_GRID_Y_Z, launch_grid
from lmcache_kernels.paged_gather import kernel as gather_kernel
from lmcache_kernels.paged_gather import paged_gather_reference
from lmcache_kernels.paged_layout import checked_layout
from lmcache_kernels.paged_scatter import kernel as scatter_kernel
from lmcache_kernels.paged_scatter import paged_scatter_reference

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = (
    pytest.param(gather_kernel.launch, paged_gather_reference, id="gather"),
    pytest.param(scatter_kernel.launch, paged_scatter_reference, id="scatter"),
)
SHAPE = (3, 5, 3, 2, 7, 11, 2)


def layout_of(case):
    return checked_layout(*case.args())


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("launch", "reference"), OPS)
def test_the_kernel_is_the_reference(make_case, dtype, shape, launch, reference, aligned):
    case, expected = (make_case(dtype, shape, device=DEVICE, aligned=aligned) for _ in range(2))
    if case.slots.numel() == 0:
        return
    launch(layout_of(case))
    reference(layout_of(expected))
    assert torch.equal(case.pool, expected.pool)


@settings(deadline=None, max_examples=40)
@given(slots=st.lists(st.integers(0, 14), min_size=1, max_size=30), seed=st.integers(0, 1000))
def test_gather_takes_any_slots(make_case, slots, seed):
    case, expected = (make_case(torch.bfloat16, SHAPE, seed=seed, slots=slots, device=DEVICE) for _ in range(2))
    gather_kernel.launch(layout_of(case))
    paged_gather_reference(layout_of(expected))
    assert torch.equal(case.pool, expected.pool)


@settings(deadline=None, max_examples=40)
@given(slots=st.lists(st.integers(0, 14), min_size=1, max_size=15, unique=True), seed=st.integers(0, 1000))
def test_scatter_takes_distinct_slots(make_case, slots, seed):
    case, expected = (make_case(torch.float8_e5m2, SHAPE, seed=seed, slots=slots, device=DEVICE) for _ in range(2))
    scatter_kernel.launch(layout_of(case))
    paged_scatter_reference(layout_of(expected))
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize(("launch", "reference"), OPS)
def test_layers_may_have_strides_of_their_own(make_case, launch, reference):
    def mixed():
        dense, padded = (make_case(torch.float16, (1, 5, 3, 2, 7, 11, padding), device=DEVICE) for padding in (0, 9))
        blob = torch.zeros(2, 2, 11, 14, dtype=torch.float16, device=DEVICE)
        return (dense, padded), checked_layout(dense.keys + padded.keys, dense.values + padded.values, dense.slots, blob)

    (cases, layout), (expected_cases, expected) = mixed(), mixed()
    launch(layout)
    reference(expected)
    assert torch.equal(layout.blob.view(torch.uint8), expected.blob.view(torch.uint8))
    assert all(torch.equal(a.pool, b.pool) for a, b in zip(cases, expected_cases, strict=True))


@pytest.mark.parametrize(("launch", "reference"), OPS)
def test_addresses_beyond_two_to_the_31_elements(launch, reference):
    """Two blocks that lie 2^31 + 8 bytes apart in one sparse piece of memory: 32-bit products would wrap."""
    apart = (1 << 31) + 8
    memory = torch.empty(2 * apart + 64, dtype=torch.uint8, device=DEVICE)
    keys, values = (memory.as_strided((3, 1, 1, 8), (apart, 8, 8, 1), begin) for begin in (0, 16))
    for block in range(3):
        keys[block], values[block] = block + 1, block + 11
    blob = torch.arange(2 * 3 * 8, dtype=torch.uint8, device=DEVICE).view(2, 1, 3, 8)
    layout = checked_layout([keys], [values], torch.tensor([2, 0, 1], device=DEVICE), blob)
    launch(layout)
    gathered = torch.tensor([[3, 1, 2], [13, 11, 12]], dtype=torch.uint8, device=DEVICE)
    scattered = torch.stack([keys[[2, 0, 1], 0, 0], values[[2, 0, 1], 0, 0]])[:, None]
    assert torch.equal(blob[:, 0, :, 0], gathered) if launch is gather_kernel.launch else torch.equal(blob, scattered)


def test_a_row_too_large_for_one_launch_is_refused(make_case):
    layout = layout_of(make_case(torch.uint8, SHAPE))
    huge = dataclasses.replace(layout, pages=layout.pages[:1] * (MAX_GRID_Y_Z + 1))
    with pytest.raises(KernelInputError, match="too many"):
        launch_grid(huge, 1)
