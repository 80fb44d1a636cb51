"""The Triton kernels against their torch references, bit for bit. Collected by
`test_interpreted.py` only.
"""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_copy import paged_gather_reference, paged_scatter_reference
from lmcache_kernels.paged_copy.kernel import MAX_GRID_Y_Z, launch
from lmcache_kernels.pages import Pages

from tests.fixtures.paged_cases import COMBINATIONS, build_case, checked_copy

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
BOTH_WAYS = pytest.mark.parametrize("to_pages", [False, True], ids=["gather", "scatter"])
SHAPE = (3, 5, 3, 2, 7, 11, 2)
SIZES = {torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn}
"""Elements are moved as words of their size: one dtype of each."""
SHAPES = (
    (1, 1, 1, 1, 1, 1, 0),
    (2, 7, 1, 3, 5, 4, 0),
    (3, 5, 3, 2, 7, 9, 9),
    (1, 2, 16, 2, 72, 17, 8),
    (1, 3, 2, 1, 136, 5, 1),
)
"""As in `paged_cases`: tokens and words of a row on either side of a kernel's tile of 8 and 128."""


def copy_of(case):
    return checked_copy(*case.args(), writes_pages=False)


def copy_by_reference(copy, to_pages):
    (paged_scatter_reference if to_pages else paged_gather_reference)(copy)


def check_against_reference(to_pages, *case_of, **options):
    case, expected = (build_case(*case_of, device=DEVICE, **options) for _ in range(2))
    if case.slots.numel():
        launch(copy_of(case), to_pages)
        copy_by_reference(copy_of(expected), to_pages)
        assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize(
    ("dtype", "form", "aligned"), [one for one in COMBINATIONS if one[0] in SIZES]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BOTH_WAYS
def test_the_kernel_is_the_reference(dtype, shape, form, aligned, to_pages):
    check_against_reference(to_pages, dtype, shape, aligned=aligned, form=form)


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (1, 11), (3, 9)])
@pytest.mark.parametrize("form", ["NHD", "HND packed", "latent"])
@BOTH_WAYS
def test_a_part_of_a_chunk_is_copied_in_its_place(to_pages, form, begin, end):
    case, expected = (build_case(torch.float16, SHAPE, device=DEVICE, form=form) for _ in range(2))
    launch(case.part(begin, end, to_pages), to_pages)
    copy_by_reference(expected.part(begin, end, to_pages), to_pages)
    assert torch.equal(case.pool, expected.pool)


@settings(deadline=None, max_examples=25)
@given(
    slots=st.lists(st.integers(0, 14), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
    form=st.sampled_from(["NHD", "HND packed"]),
)
def test_gather_takes_any_slots(slots, seed, form):
    check_against_reference(False, torch.bfloat16, SHAPE, seed, slots, form=form)


@settings(deadline=None, max_examples=25)
@given(
    slots=st.lists(st.integers(0, 14), min_size=1, max_size=15, unique=True),
    seed=st.integers(0, 1000),
    form=st.sampled_from(["HND", "latent"]),
)
def test_scatter_takes_distinct_slots(slots, seed, form):
    check_against_reference(True, torch.float8_e5m2, SHAPE, seed, slots, form=form)


@BOTH_WAYS
def test_layers_may_have_strides_of_their_own(to_pages):
    def mixed():
        dense, padded = (
            build_case(torch.float16, (1, 5, 3, 2, 7, 11, padding), device=DEVICE)
            for padding in (0, 9)
        )
        blob = torch.zeros(2, 2, 11, 14, dtype=torch.float16, device=DEVICE)
        pages = Pages.of(dense.keys + padded.keys, dense.values + padded.values)
        return (dense, padded), checked_copy(pages, dense.slots, blob, writes_pages=False)

    (cases, copy), (expected_cases, expected) = mixed(), mixed()
    launch(copy, to_pages)
    copy_by_reference(expected, to_pages)
    assert torch.equal(copy.blob.view(torch.uint8), expected.blob.view(torch.uint8))
    assert all(torch.equal(a.pool, b.pool) for a, b in zip(cases, expected_cases, strict=True))


APART = (1 << 31) + 8


@pytest.mark.parametrize("far", ["blocks", "tokens", "heads"])
@BOTH_WAYS
def test_addresses_beyond_two_to_the_31_elements(to_pages, far, monkeypatch):
    """Three blocks, tokens or heads that lie 2^31 + 8 bytes apart in one sparse piece of memory:
    32-bit products would wrap.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    memory = torch.empty(2 * APART + 64, dtype=torch.uint8, device=DEVICE)
    axis = {"blocks": 0, "tokens": 1, "heads": 2}[far]
    dims, strides = [1, 1, 1, 8], [8, 8, 8, 1]
    dims[axis], strides[axis] = 3, APART
    keys, values = (memory.as_strided(dims, strides, begin) for begin in (0, 16))
    for i in range(3):
        keys.select(axis, i).fill_(i + 1)
        values.select(axis, i).fill_(i + 11)
    order = [0, 1, 2] if far == "heads" else [2, 0, 1]
    slots = torch.tensor([0] if far == "heads" else order, device=DEVICE)
    blob = torch.arange(48, dtype=torch.uint8, device=DEVICE).view(2, 1, len(slots), -1)
    wanted = blob.clone()
    if not to_pages:
        rows = torch.tensor([[i + 1 for i in order], [i + 11 for i in order]], dtype=torch.uint8)
        wanted = rows.repeat_interleave(8, 1).view(blob.shape).to(DEVICE)
    launch(checked_copy(Pages.of([keys], [values]), slots, blob, writes_pages=True), to_pages)
    assert torch.equal(blob, wanted)
    inside = [side.reshape(-1, 8)[order] for side in (keys, values)]
    assert torch.equal(torch.stack(inside).view(blob.shape), blob)


def test_more_layers_than_one_launch_takes_are_refused():
    copy = copy_of(build_case(torch.uint8, (1, 1, 1, 1, 1, 1, 0)))
    pages = Pages(copy.pages.tensors[:1] * (MAX_GRID_Y_Z + 1), num_sides=1)
    blob = torch.empty(1, MAX_GRID_Y_Z + 1, 1, 1, dtype=torch.uint8)
    with pytest.raises(KernelInputError, match="too many"):
        launch(checked_copy(pages, copy.slots, blob, writes_pages=False), False)
