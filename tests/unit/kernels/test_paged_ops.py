"""The wrappers and their torch references, on a CPU, against a loop over single tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_kernels import KernelInputError
from lmcache_kernels.paged_copy import CheckedSlots, checked_copy
from lmcache_kernels.paged_gather import paged_gather, paged_gather_reference
from lmcache_kernels.paged_scatter import paged_scatter, paged_scatter_reference
from lmcache_kernels.pages import Pages

FORMS = ("NHD", "HND", "NHD packed", "HND packed", "latent")
SHAPE = (3, 5, 3, 2, 7, 11, 2)
OPS = (paged_gather, paged_scatter)


def fill_chunk(case):
    """Give the chunk bytes of its own, which a scatter can bring into the pages."""
    random = torch.Generator().manual_seed(99)
    case.blob.view(torch.uint8).copy_(
        torch.randint(
            0, 256, case.blob.view(torch.uint8).shape, dtype=torch.uint8, generator=random
        )
    )
    return case


def gather_by_reference(pages, slots, blob):
    paged_gather_reference(checked_copy(pages, slots, blob, writes_pages=False))


def scatter_by_reference(pages, slots, blob):
    paged_scatter_reference(checked_copy(pages, slots, blob, writes_pages=True))


@pytest.mark.parametrize("gather", [paged_gather, gather_by_reference])
@pytest.mark.parametrize("aligned", [False, True])
def test_gather_fills_the_chunk_and_nothing_else(make_case, dtype, shape, form, aligned, gather):
    case, expected = (make_case(dtype, shape, aligned=aligned, form=form) for _ in range(2))
    gather(*case.args())
    expected.gather_slowly()
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize("scatter", [paged_scatter, scatter_by_reference])
@pytest.mark.parametrize("aligned", [False, True])
def test_scatter_fills_the_slots_and_nothing_else(make_case, dtype, shape, form, aligned, scatter):
    case, expected = (
        fill_chunk(make_case(dtype, shape, aligned=aligned, form=form)) for _ in range(2)
    )
    scatter(*case.args())
    expected.scatter_slowly()
    assert torch.equal(case.pool, expected.pool)


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
def test_blocks_cut_anywhere_go_both_ways(make_case, slots, form, padding, seed):
    shape = (2, 9, 6, 2, 3, 0, padding)
    case, expected = (
        fill_chunk(make_case(torch.float16, shape, seed, slots, form=form)) for _ in range(2)
    )
    paged_scatter(*case.args())
    expected.scatter_slowly()
    assert torch.equal(case.pool, expected.pool)
    for each in (case, expected):
        each.blob.view(torch.uint8).fill_(0xA5)
    paged_gather(*case.args())
    expected.gather_slowly()
    assert torch.equal(case.pool, expected.pool)


@settings(deadline=None, max_examples=60)
@given(slots=st.lists(st.integers(0, 14), max_size=40), seed=st.integers(0, 1000))
def test_gather_takes_any_slots_in_any_order(make_case, slots, seed):
    case, expected = (make_case(torch.bfloat16, SHAPE, seed=seed, slots=slots) for _ in range(2))
    paged_gather(*case.args())
    expected.gather_slowly()
    assert torch.equal(case.pool, expected.pool)


@settings(deadline=None, max_examples=60)
@given(slots=st.lists(st.integers(0, 14), max_size=15, unique=True), seed=st.integers(0, 1000))
def test_what_is_scattered_is_gathered_again(make_case, slots, seed):
    case = fill_chunk(make_case(torch.float16, SHAPE, seed=seed, slots=slots))
    wanted = case.blob.view(torch.uint8).clone()
    paged_scatter(*case.args())
    case.blob.view(torch.uint8).fill_(0)
    paged_gather(*case.args())
    assert torch.equal(case.blob.view(torch.uint8), wanted)


@pytest.mark.parametrize(
    ("shape", "aligned", "word_bytes"),
    [
        ((2, 3, 16, 1, 64, 5, 0), True, 8),
        ((2, 3, 16, 1, 64, 5, 0), False, 2),
        ((2, 3, 16, 1, 64, 5, 2), True, 4),
        ((2, 3, 16, 1, 64, 5, 1), True, 2),
        ((2, 3, 16, 2, 7, 5, 0), True, 4),
        ((2, 3, 16, 1, 7, 5, 0), True, 2),
    ],
)
def test_words_are_as_wide_as_addresses_rows_and_strides_allow(
    make_case, shape, aligned, word_bytes
):
    assert (
        checked_copy(
            *make_case(torch.float16, shape, aligned=aligned).args(), writes_pages=False
        ).word_bytes
        == word_bytes
    )


def test_signalling_nans_keep_their_payload(make_case):
    case = make_case(torch.float32, SHAPE)
    case.keys[0].view(torch.int32).fill_(0x7FA12345)
    paged_gather(*case.args())
    assert torch.all(case.blob[0, 0].view(torch.int32) == 0x7FA12345)


@pytest.mark.parametrize("op", OPS)
def test_slots_may_be_a_strided_slice(make_case, op):
    case, expected = (
        fill_chunk(make_case(torch.float16, SHAPE)),
        fill_chunk(make_case(torch.float16, SHAPE)),
    )
    spread = torch.stack([case.slots, torch.full_like(case.slots, -1)], dim=1).flatten()[::2]
    assert not spread.is_contiguous()
    op(case.args()[0], spread, case.blob)
    op(*expected.args())
    assert torch.equal(case.pool, expected.pool)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inference", [False, True])
def test_tensors_may_belong_to_autograd_or_to_inference_mode(op, inference):
    with torch.inference_mode(inference):
        pages = [torch.zeros(2, 2, 1, 4, requires_grad=not inference) for _ in range(2)]
        blob = torch.ones(2, 1, 3, 4)
    op(Pages.of(pages[:1], pages[1:]), torch.tensor([0, 1, 3]), blob)
    assert sum(float(page.detach().sum()) for page in pages) == float(blob.sum())


def wrong(name, change):
    return pytest.param(change, id=name)


def replace(case, **changes):
    for name, value in changes.items():
        setattr(case, name, value)


BOTH = [
    wrong("no layers", lambda c: replace(c, keys=[], values=[])),
    wrong("one side too few", lambda c: replace(c, values=[])),
    wrong("fewer values than keys", lambda c: replace(c, values=c.values[:-1])),
    wrong("a page of three dimensions", lambda c: replace(c, keys=[k.flatten(2) for k in c.keys])),
    wrong(
        "a page of another shape", lambda c: replace(c, values=[*c.values[:-1], c.values[-1][:-1]])
    ),
    wrong(
        "a page of another dtype",
        lambda c: replace(c, values=[*c.values[:-1], c.values[-1].view(torch.bfloat16)]),
    ),
    wrong(
        "a page on another device",
        lambda c: replace(c, values=[*c.values[:-1], c.values[-1].to("meta")]),
    ),
    wrong(
        "heads that are not contiguous",
        lambda c: replace(
            c, keys=[k[..., ::2] for k in c.keys], values=[v[..., ::2] for v in c.values]
        ),
    ),
    wrong(
        "heads that overlap",
        lambda c: replace(c, keys=[c.keys[0][:, :, :1].expand(-1, -1, 2, -1), *c.keys[1:]]),
    ),
    wrong(
        "tokens that overlap",
        lambda c: replace(c, keys=[c.keys[0][:, :1].expand(-1, 3, -1, -1), *c.keys[1:]]),
    ),
    wrong(
        "blocks that overlap",
        lambda c: replace(c, keys=[c.keys[0][:1].expand(5, -1, -1, -1), *c.keys[1:]]),
    ),
    wrong(
        "empty rows",
        lambda c: replace(
            c, keys=[k[..., :0] for k in c.keys], values=[v[..., :0] for v in c.values]
        ),
    ),
    wrong("a chunk with too many tokens", lambda c: replace(c, slots=c.slots[:-1])),
    wrong("a chunk with too few layers", lambda c: replace(c, blob=c.blob[:, :-1])),
    wrong(
        "a chunk that is not contiguous",
        lambda c: replace(c, blob=c.blob.transpose(0, 1).contiguous().transpose(0, 1)),
    ),
    wrong("a chunk of another dtype", lambda c: replace(c, blob=c.blob.view(torch.bfloat16))),
    wrong("a chunk on another device", lambda c: replace(c, blob=c.blob.to("meta"))),
    wrong("int32 slots", lambda c: replace(c, slots=c.slots.int())),
    wrong("slots of two dimensions", lambda c: replace(c, slots=c.slots[None])),
    wrong("slots on another device", lambda c: replace(c, slots=c.slots.to("meta"))),
    wrong("a negative slot", lambda c: c.slots.__setitem__(-1, -1)),
    wrong("a slot behind the last", lambda c: c.slots.__setitem__(0, 15)),
    wrong("a slot far behind the last", lambda c: c.slots.__setitem__(0, 1 << 62)),
]
SCATTER_ONLY = [
    wrong("a slot twice", lambda c: c.slots.__setitem__(0, c.slots[5].item())),
    wrong("a layer twice", lambda c: replace(c, keys=[c.keys[0], c.keys[0], c.keys[2]])),
    wrong("keys as values", lambda c: replace(c, values=c.keys)),
]


@pytest.mark.parametrize(
    ("op", "changes"),
    [(op, c.values[0]) for op in OPS for c in BOTH]
    + [(paged_scatter, c.values[0]) for c in SCATTER_ONLY],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(make_case, op, changes):
    case = fill_chunk(make_case(torch.float16, SHAPE))
    changes(case)
    before = case.pool.clone()
    with pytest.raises(KernelInputError):
        op(*case.args())
    assert torch.equal(case.pool, before)


def test_a_cpu_op_does_not_import_triton():
    program = """
import sys, torch
from lmcache_kernels.pages import Pages
from lmcache_kernels.paged_gather import paged_gather
page = torch.zeros(1, 1, 1, 1)
paged_gather(Pages.of([page], [page]), torch.tensor([0]), torch.empty(2, 1, 1, 1))
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_slots_that_were_checked_for_reading_are_not_written():
    keys = torch.zeros(4, 2, 1, 4)
    checked = CheckedSlots.of(Pages.of([keys]), torch.tensor([1, 1]), once=False)
    blob = torch.ones(1, 1, 2, 4)
    assert checked.copy_with(blob, writes_pages=False).num_tokens == 2
    with pytest.raises(KernelInputError, match="checked for reading"):
        checked.copy_with(blob, writes_pages=True)
