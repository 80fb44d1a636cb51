"""The Triton kernels against their torch references, bit for bit. Collected by
`test_interpreted.py` only.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_addressing import MAX_GRID_Y_Z, launch_grid
from lmcache_kernels.paged_copy import checked_copy
from lmcache_kernels.paged_gather import kernel as gather_kernel
from lmcache_kernels.paged_gather import paged_gather_reference
from lmcache_kernels.paged_scatter import kernel as scatter_kernel
from lmcache_kernels.paged_scatter import paged_scatter_reference
from lmcache_kernels.pages import Pages

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = (
    pytest.param(gather_kernel.launch, paged_gather_reference, id="gather"),
    pytest.param(scatter_kernel.launch, paged_scatter_reference, id="scatter"),
)
SHAPE = (3, 5, 3, 2, 7, 11, 2)


def copy_of(case):
    return checked_copy(*case.args(), writes_pages=False)


def check_against_reference(make_case, launch, reference, *case_of, **options):
    case, expected = (make_case(*case_of, device=DEVICE, **options) for _ in range(2))
    if case.slots.numel() == 0:
        return
    launch(copy_of(case))
    reference(copy_of(expected))
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("launch", "reference"), OPS)
def test_the_kernel_is_the_reference_for_every_dtype(
    make_case, dtype, shape, launch, reference, aligned
):
    check_against_reference(make_case, launch, reference, dtype, shape, aligned=aligned)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("launch", "reference"), OPS)
def test_the_kernel_is_the_reference_for_every_form(
    make_case, dtype, shape, form, launch, reference
):
    check_against_reference(
        make_case, launch, reference, dtype, shape, aligned=dtype == torch.bfloat16, form=form
    )


@settings(deadline=None, max_examples=40)
@given(
    slots=st.lists(st.integers(0, 14), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
    form=st.sampled_from(["NHD", "HND packed"]),
)
def test_gather_takes_any_slots(make_case, slots, seed, form):
    case, expected = (
        make_case(torch.bfloat16, SHAPE, seed=seed, slots=slots, device=DEVICE, form=form)
        for _ in range(2)
    )
    gather_kernel.launch(copy_of(case))
    paged_gather_reference(copy_of(expected))
    assert torch.equal(case.pool, expected.pool)


@settings(deadline=None, max_examples=40)
@given(
    slots=st.lists(st.integers(0, 14), min_size=1, max_size=15, unique=True),
    seed=st.integers(0, 1000),
    form=st.sampled_from(["HND", "latent"]),
)
def test_scatter_takes_distinct_slots(make_case, slots, seed, form):
    case, expected = (
        make_case(torch.float8_e5m2, SHAPE, seed=seed, slots=slots, device=DEVICE, form=form)
        for _ in range(2)
    )
    scatter_kernel.launch(copy_of(case))
    paged_scatter_reference(copy_of(expected))
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize(("launch", "reference"), OPS)
def test_layers_may_have_strides_of_their_own(make_case, launch, reference):
    def mixed():
        dense, padded = (
            make_case(torch.float16, (1, 5, 3, 2, 7, 11, padding), device=DEVICE)
            for padding in (0, 9)
        )
        blob = torch.zeros(2, 2, 11, 14, dtype=torch.float16, device=DEVICE)
        pages = Pages.of(dense.keys + padded.keys, dense.values + padded.values)
        return (dense, padded), checked_copy(pages, dense.slots, blob, writes_pages=False)

    (cases, copy), (expected_cases, expected) = mixed(), mixed()
    launch(copy)
    reference(expected)
    assert torch.equal(copy.blob.view(torch.uint8), expected.blob.view(torch.uint8))
    assert all(torch.equal(a.pool, b.pool) for a, b in zip(cases, expected_cases, strict=True))


APART = (1 << 31) + 8


@pytest.mark.parametrize("far", ["blocks", "tokens", "heads"])
@pytest.mark.parametrize(("launch", "reference"), OPS)
def test_addresses_beyond_two_to_the_31_elements(launch, reference, far):
    """Three blocks, tokens or heads that lie 2^31 + 8 bytes apart in one sparse piece of memory:
    32-bit products would wrap.
    """
    memory = torch.empty(2 * APART + 64, dtype=torch.uint8, device=DEVICE)
    axis = {"blocks": 0, "tokens": 1, "heads": 2}[far]
    dims, strides = [1, 1, 1, 8], [8, 8, 8, 1]
    dims[axis], strides[axis] = 3, APART
    keys, values = (memory.as_strided(dims, strides, begin) for begin in (0, 16))
    for i in range(3):
        keys.select(axis, i).fill_(i + 1)
        values.select(axis, i).fill_(i + 11)
    slots = torch.tensor([0] if far == "heads" else [2, 0, 1], device=DEVICE)
    blob = torch.arange(48, dtype=torch.uint8, device=DEVICE).view(2, 1, len(slots), -1)
    wanted = blob.clone()
    if launch is gather_kernel.launch:
        order = [0, 1, 2] if far == "heads" else [2, 0, 1]
        wanted = (
            torch.tensor([[i + 1 for i in order], [i + 11 for i in order]], dtype=torch.uint8)
            .repeat_interleave(8, 1)
            .view(blob.shape)
        )
    launch(checked_copy(Pages.of([keys], [values]), slots, blob, writes_pages=True))
    inside = [
        side.reshape(-1, 8)[slots if far != "heads" else slice(None)] for side in (keys, values)
    ]
    assert torch.equal(blob, wanted.to(DEVICE))
    assert torch.equal(torch.stack(inside).view(blob.shape), blob)


def test_a_row_too_large_for_one_launch_is_refused(make_case):
    copy = copy_of(make_case(torch.uint8, SHAPE))
    huge = Pages(copy.pages.tensors[:1] * (MAX_GRID_Y_Z + 1), num_sides=1)
    with pytest.raises(KernelInputError, match="too many"):
        launch_grid(dataclasses.replace(copy, pages=huge))
