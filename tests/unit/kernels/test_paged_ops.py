"""The ops and their torch references, on a CPU, against a loop over single tokens."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_kernels import KernelInputError
from lmcache_kernels.paged_copy import (
    CheckedSlots,
    paged_gather_reference,
    paged_gather_steps,
    paged_scatter_reference,
    paged_scatter_steps,
)
from lmcache_kernels.paged_copy.descriptors import descriptors_of
from lmcache_kernels.pages import Pages

from tests.fixtures.paged_cases import (
    COMBINATIONS,
    FORMS,
    SHAPES,
    build_case,
    checked_copy,
    paged_gather,
    paged_scatter,
)

SHAPE = (3, 5, 3, 2, 7, 11, 2)
OPS = (paged_gather, paged_scatter)


def filled_case(*args, **options):
    case = build_case(*args, **options)
    case.fill_chunk()
    return case


def gather_by_reference(pages, slots, blob):
    paged_gather_reference(checked_copy(pages, slots, blob, writes_pages=False))


def scatter_by_reference(pages, slots, blob):
    paged_scatter_reference(checked_copy(pages, slots, blob, writes_pages=True))


def described_copy(copy, to_pages):
    """What a copy engine does; where tokens are not contiguous, what a kernel does."""
    slots, chunk = copy.slots.numpy(), copy.blob
    runs = len(slots) and descriptors_of(copy.pages, slots, copy.first, chunk.shape[2])
    if not runs:
        (paged_scatter_reference if to_pages else paged_gather_reference)(copy)
        return
    for page, offset, size in zip(runs.pages, runs.chunk, runs.sizes, strict=True):
        both = int(page), chunk.data_ptr() + int(offset)
        ctypes.memmove(*(both if to_pages else both[::-1]), int(size))


def gather_by_runs(pages, slots, blob):
    described_copy(checked_copy(pages, slots, blob, writes_pages=False), to_pages=False)


def scatter_by_runs(pages, slots, blob):
    described_copy(checked_copy(pages, slots, blob, writes_pages=True), to_pages=True)


def check_op(op, to_pages, *args, **options):
    """That an op writes what it should, and no other byte of the pool."""
    case, expected = (filled_case(*args, **options) for _ in range(2))
    op(*case.args())
    expected.copy_slowly(to_pages)
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize(
    ("op", "to_pages"),
    [
        (paged_gather, False),
        (gather_by_reference, False),
        (gather_by_runs, False),
        (paged_scatter, True),
        (scatter_by_reference, True),
        (scatter_by_runs, True),
    ],
)
@pytest.mark.parametrize(("dtype", "form", "aligned"), COMBINATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_op_copies_the_slots_and_nothing_else(dtype, shape, form, aligned, op, to_pages):
    check_op(op, to_pages, dtype, shape, aligned=aligned, form=form)


def gather_steps(copy):
    list(paged_gather_steps(copy))


def scatter_steps(copy):
    list(paged_scatter_steps(copy))


@pytest.mark.parametrize(
    ("op", "to_pages"),
    [
        (gather_steps, False),
        (paged_gather_reference, False),
        (partial(described_copy, to_pages=False), False),
        (scatter_steps, True),
        (paged_scatter_reference, True),
        (partial(described_copy, to_pages=True), True),
    ],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("begin", "end"), [(0, 11), (0, 4), (3, 9), (10, 11), (5, 5)])
def test_a_part_of_a_chunk_is_copied_in_its_place(begin, end, form, op, to_pages):
    case, expected = (filled_case(torch.float16, SHAPE, form=form) for _ in range(2))
    op(case.part(begin, end, to_pages))
    expected.copy_slowly(to_pages, begin, end)
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_are_one_run_where_rows_are_adjacent(form):
    """K and V of a head side by side, or heads before tokens, are not."""
    case = filled_case(torch.float16, (2, 5, 4, 2, 8, 0, 3), slots=[8, 9, 10, 11, 4, 5, 6, 7, 12])
    pages = build_case(torch.float16, (2, 5, 4, 2, 8, 0, 3), form=form).args()[0]
    runs = descriptors_of(pages, case.slots.numpy(), 0, len(case.slots))
    if form in ("NHD", "latent"):
        row = 2 * 8 * 2
        assert runs.sizes.tolist() == [4 * row, 4 * row, row] * len(pages.tensors)
    else:
        assert runs is None


@pytest.mark.parametrize("first", [-1, 2])
def test_a_part_lies_inside_its_chunk(first):
    checked = CheckedSlots.of(Pages.of([torch.zeros(4, 2, 1, 4)]), torch.arange(3), once=True)
    with pytest.raises(KernelInputError, match=f"3 slots for tokens from {first} of a chunk of 4"):
        checked.copy_with(torch.ones(1, 1, 4, 4), False, first, 4)


@st.composite
def engine_slots(draw, num_blocks=9, block_size=6):
    """Slots as engines give them: whole blocks in any order, cut at both ends; with now and then
    a token out of order.
    """
    blocks = draw(st.permutations(range(num_blocks)))[: draw(st.integers(1, num_blocks))]
    slots = [block * block_size + i for block in blocks for i in range(block_size)]
    begin = draw(st.integers(0, block_size))
    slots = slots[begin : len(slots) - draw(st.integers(0, block_size))]
    if len(slots) > 1 and draw(st.booleans()):
        i, j = draw(st.integers(0, len(slots) - 1)), draw(st.integers(0, len(slots) - 1))
        slots[i], slots[j] = slots[j], slots[i]
    return slots


@settings(deadline=None, max_examples=150)
@given(
    slots=engine_slots(),
    form=st.sampled_from(FORMS),
    padding=st.integers(0, 25),
    seed=st.integers(0, 1000),
)
def test_blocks_cut_anywhere_go_both_ways(slots, form, padding, seed):
    shape = (2, 9, 6, 2, 3, 0, padding)
    for op, to_pages in ((paged_scatter, True), (paged_gather, False)):
        check_op(op, to_pages, torch.float16, shape, seed, slots, form=form)


@pytest.mark.parametrize(
    ("row", "padding", "aligned", "word_bytes"),
    [
        ((1, 64), 0, True, 8),
        ((1, 64), 0, False, 2),
        ((1, 64), 2, True, 4),
        ((1, 64), 1, True, 2),
        ((2, 7), 0, True, 4),
        ((1, 7), 0, True, 2),
    ],
)
def test_words_are_as_wide_as_addresses_rows_and_strides_allow(row, padding, aligned, word_bytes):
    case = build_case(torch.float16, (2, 3, 16, *row, 5, padding), aligned=aligned)
    assert checked_copy(*case.args(), writes_pages=False).word_bytes == word_bytes


def test_signalling_nans_keep_their_payload():
    case = build_case(torch.float32, SHAPE)
    case.keys[0].view(torch.int32).fill_(0x7FA12345)
    paged_gather(*case.args())
    assert torch.all(case.blob[0, 0].view(torch.int32) == 0x7FA12345)


@pytest.mark.parametrize("op", OPS)
def test_slots_may_be_a_strided_slice(op):
    case, expected = filled_case(torch.float16, SHAPE), filled_case(torch.float16, SHAPE)
    spread = torch.stack([case.slots, torch.full_like(case.slots, -1)], dim=1).flatten()[::2]
    assert not spread.is_contiguous()
    op(case.args()[0], spread, case.blob)
    op(*expected.args())
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("slots", [[0, 1, 3], [0, 1], [2, 1]])
def test_tensors_may_belong_to_autograd_or_to_inference_mode(op, inference, slots):
    with torch.inference_mode(inference):
        pages = [torch.zeros(2, 2, 1, 4, requires_grad=not inference) for _ in range(2)]
        blob = torch.ones(2, 1, len(slots), 4)
    op(Pages.of(pages[:1], pages[1:]), torch.tensor(slots), blob)
    assert sum(float(page.detach().sum()) for page in pages) == float(blob.sum())


def replace(**changes):
    """Return a change of a case: attributes made from the case."""

    def change(case):
        for name, value in {name: make(case) for name, make in changes.items()}.items():
            setattr(case, name, value)

    return change


def first_key(cut):
    return replace(keys=lambda c: [cut(c.keys[0]), *c.keys[1:]])


def last_value(cut):
    return replace(values=lambda c: [*c.values[:-1], cut(c.values[-1])])


def all_pages(cut):
    return replace(keys=lambda c: [*map(cut, c.keys)], values=lambda c: [*map(cut, c.values)])


def slot(index, value):
    return lambda case: case.slots.__setitem__(index, value)


WRONG = {
    "no layers": replace(keys=lambda c: [], values=lambda c: []),
    "one side too few": replace(values=lambda c: []),
    "fewer values than keys": replace(values=lambda c: c.values[:-1]),
    "pages of three dimensions": replace(keys=lambda c: [k.flatten(2) for k in c.keys]),
    "a page of another shape": last_value(lambda v: v[:-1]),
    "a page of another dtype": last_value(lambda v: v.view(torch.bfloat16)),
    "a page on another device": last_value(lambda v: v.to("meta")),
    "heads that are not contiguous": all_pages(lambda t: t[..., ::2]),
    "heads that overlap": first_key(lambda k: k[:, :, :1].expand(-1, -1, 2, -1)),
    "tokens that overlap": first_key(lambda k: k[:, :1].expand(-1, 3, -1, -1)),
    "blocks that overlap": first_key(lambda k: k[:1].expand(5, -1, -1, -1)),
    "empty rows": all_pages(lambda t: t[..., :0]),
    "a chunk with too many tokens": replace(slots=lambda c: c.slots[:-1]),
    "a chunk with too few layers": replace(blob=lambda c: c.blob[:, :-1]),
    "a chunk with gaps": replace(
        blob=lambda c: c.blob.transpose(0, 1).contiguous().transpose(0, 1)
    ),
    "a chunk of another dtype": replace(blob=lambda c: c.blob.view(torch.bfloat16)),
    "a chunk on another device": replace(blob=lambda c: c.blob.to("meta")),
    "int32 slots": replace(slots=lambda c: c.slots.int()),
    "slots of two dimensions": replace(slots=lambda c: c.slots[None]),
    "slots on another device": replace(slots=lambda c: c.slots.to("meta")),
    "a negative slot": slot(-1, -1),
    "a slot after the last": slot(0, 15),
    "a slot far after the last": slot(0, 1 << 62),
}
WRONG_TO_WRITE = {
    "a slot twice": lambda case: case.slots.__setitem__(0, case.slots[5].item()),
    "a layer twice": replace(keys=lambda c: [c.keys[0], c.keys[0], c.keys[2]]),
    "keys as values": replace(values=lambda c: c.keys),
}


@pytest.mark.parametrize(
    ("op", "change"),
    [
        pytest.param(op, change, id=f"{op.__name__}: {name}")
        for op, changes in ((paged_gather, WRONG), (paged_scatter, WRONG | WRONG_TO_WRITE))
        for name, change in changes.items()
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(op, change):
    case = filled_case(torch.float16, SHAPE)
    change(case)
    before = case.pool.clone()
    with pytest.raises(KernelInputError):
        op(*case.args())
    assert torch.equal(case.pool, before)


def test_repeated_slots_are_counted_without_sorting_them(monkeypatch):
    """On the host, torch would take threads, which wait for processors that the engine uses."""
    for name in ("sort", "aminmax"):
        monkeypatch.setattr(torch.Tensor, name, None)
        monkeypatch.setattr(torch, name, None)
    pages = Pages.of([torch.zeros(4, 2, 1, 1)])
    CheckedSlots.of(pages, torch.tensor([3, 1, 7, 0]), once=True)
    CheckedSlots.of(pages, torch.tensor([3, 3]), once=False)
    with pytest.raises(KernelInputError, match="names 3 slots more than once"):
        CheckedSlots.of(pages, torch.tensor([3, 1, 7, 1, 0, 7, 7]), once=True)


def test_a_cpu_op_does_not_import_triton():
    program = """
import sys, torch
from lmcache_kernels.pages import Pages
from lmcache_kernels.paged_copy import CheckedSlots, paged_gather_steps
page = torch.zeros(1, 1, 1, 1)
slots = CheckedSlots.of(Pages.of([page], [page]), torch.tensor([0]), once=False)
list(paged_gather_steps(slots.copy_with(torch.empty(2, 1, 1, 1), writes_pages=False)))
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_slots_that_were_checked_for_reading_are_not_written():
    checked = CheckedSlots.of(Pages.of([torch.zeros(4, 2, 1, 4)]), torch.tensor([1, 1]), once=False)
    blob = torch.ones(1, 1, 2, 4)
    assert len(checked.copy_with(blob, writes_pages=False).slots) == 2
    with pytest.raises(KernelInputError, match="checked for reading"):
        checked.copy_with(blob, writes_pages=True)
