from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmcache_core.errors import IntegrityError
from lmcache_core.memory import ALIGN_BYTES, FreeBlock, FreeList
from lmcache_core.memory.free_list import extent_bytes

CAPACITY = 16 * ALIGN_BYTES


def test_sizes_are_rounded_up_to_the_alignment():
    assert [extent_bytes(n) for n in (0, 1, 511, 512, 513)] == [512, 512, 512, 512, 1024]


def test_the_smallest_extent_that_fits_is_taken():
    free = FreeList(CAPACITY)
    taken = [free.allocate(n * ALIGN_BYTES) for n in (4, 1, 2, 1, 8)]
    free.free(taken[0].start)
    free.free(taken[2].start)
    assert free.allocate(2 * ALIGN_BYTES) == taken[2]
    assert free.allocate(3 * ALIGN_BYTES).start == taken[0].start
    free.check_integrity()


def test_of_several_that_fit_as_well_the_one_freed_last_is_taken():
    free = FreeList(CAPACITY)
    taken = [free.allocate(1) for _ in range(6)]
    for i in (4, 0, 2):
        free.free(taken[i].start)
    assert [free.allocate(1) for _ in range(3)] == [taken[2], taken[0], taken[4]]
    free.check_integrity()


@pytest.mark.parametrize("start", [0, ALIGN_BYTES, 1, -1, CAPACITY])
def test_what_is_not_handed_out_cannot_be_freed(start):
    free = FreeList(CAPACITY)
    free.free(free.allocate(1).start)
    kept = free.allocate(2 * ALIGN_BYTES)
    assert kept.start == 0
    if start != 0:
        with pytest.raises(IntegrityError):
            free.free(start)
    free.free(0)
    with pytest.raises(IntegrityError):
        free.free(0)
    free.check_integrity()


@pytest.mark.parametrize("capacity", [0, 1, ALIGN_BYTES - 1])
def test_less_than_one_unit_holds_nothing(capacity):
    free = FreeList(capacity)
    assert free.capacity == 0
    assert free.allocate(1) is None
    free.check_integrity()


def test_a_tail_shorter_than_the_alignment_is_left_unused():
    assert FreeList(CAPACITY + 511).capacity == CAPACITY


def spoil_used_bytes(free):
    free.used_bytes += 1


def spoil_overlap(free):
    free._used[ALIGN_BYTES * 8] = ALIGN_BYTES


def spoil_leak(free):
    free.used_bytes -= free._used.popitem()[1]


def spoil_bins(free):
    free._bins.clear()


def spoil_sizes(free):
    free._sizes.clear()


def spoil_ends(free):
    [block] = free.free_blocks()
    free._start_before[block.start + block.size] -= ALIGN_BYTES


def spoil_end(free):
    free._size_at[free.capacity - ALIGN_BYTES] = free._size_at.pop(ALIGN_BYTES)


def spoil_coalescing(free):
    [block] = free.free_blocks()
    free._remove(block.start, block.size)
    free._insert(block.start, ALIGN_BYTES)
    free._insert(block.start + ALIGN_BYTES, block.size - ALIGN_BYTES)


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_used_bytes,
        spoil_overlap,
        spoil_leak,
        spoil_bins,
        spoil_sizes,
        spoil_ends,
        spoil_end,
        spoil_coalescing,
    ],
)
def test_books_that_do_not_balance_are_noticed(spoil):
    free = FreeList(CAPACITY)
    free.allocate(1)
    free.check_integrity()
    spoil(free)
    with pytest.raises(IntegrityError):
        free.check_integrity()


class FreeListMachine(RuleBasedStateMachine):
    """Against a list of bytes, each marked with its owner."""

    def __init__(self):
        super().__init__()
        self.free = FreeList(CAPACITY)
        self.owner = [None] * (CAPACITY // ALIGN_BYTES)
        self.taken = {}
        self.count = 0

    @rule(size=st.integers(0, CAPACITY + 100))
    def allocate(self, size):
        units = max(1, -(-size // ALIGN_BYTES))
        block = self.free.allocate(size)
        runs = "".join("." if owner is None else "x" for owner in self.owner).split("x")
        if block is None:
            assert max(map(len, runs)) < units
            return
        assert block.size == units * ALIGN_BYTES
        at = block.start // ALIGN_BYTES
        assert block.start % ALIGN_BYTES == 0
        assert self.owner[at : at + units] == [None] * units
        self.count += 1
        self.owner[at : at + units] = [self.count] * units
        self.taken[self.count] = block

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data):
        name = data.draw(st.sampled_from(sorted(self.taken)))
        self.free.free(self.taken.pop(name).start)
        self.owner = [None if owner == name else owner for owner in self.owner]

    @precondition(lambda self: self.taken)
    @rule()
    def give_everything_back(self):
        for block in self.taken.values():
            self.free.free(block.start)
        self.taken.clear()
        self.owner = [None] * len(self.owner)
        assert self.free.free_blocks() == [FreeBlock(0, CAPACITY)]

    @invariant()
    def books_balance(self):
        self.free.check_integrity()
        assert self.free.used_bytes == sum(owner is not None for owner in self.owner) * ALIGN_BYTES
        assert self.free.num_used_blocks == len(self.taken)
        assert (
            sum(block.size for block in self.free.free_blocks()) + self.free.used_bytes == CAPACITY
        )


FreeListMachine.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)
TestFreeList = FreeListMachine.TestCase


def units(start: int, size: int) -> FreeBlock:
    return FreeBlock(start * ALIGN_BYTES, size * ALIGN_BYTES)


def test_extents_of_earlier_books_are_taken_where_they_were():
    free = FreeList(CAPACITY)
    free.take([units(10, 2), units(0, 1), units(3, 2), units(5, 1)])
    free.check_integrity()
    assert free.free_blocks() == [units(1, 2), units(6, 4), units(12, 4)]
    assert (free.used_bytes, free.num_used_blocks) == (6 * ALIGN_BYTES, 4)
    free.take([units(12, 4), units(7, 1)])
    free.check_integrity()
    assert free.free_blocks() == [units(1, 2), units(6, 1), units(8, 2)]
    for start in (0, 3, 5, 7, 10, 12):
        free.free(start * ALIGN_BYTES)
    free.check_integrity()
    assert free.free_blocks() == [units(0, 16)]


@pytest.mark.parametrize(
    "extents",
    [
        [units(4, 1)],
        [units(3, 2)],
        [units(4, 1), units(0, 1)],
        [units(5, 4)],
        [units(15, 2)],
        [units(16, 1)],
        [units(-1, 1)],
        [units(0, 2), units(1, 1)],
        [units(0, 1), units(0, 1)],
        [units(0, 0)],
        [units(0, -1)],
        [FreeBlock(1, ALIGN_BYTES)],
        [FreeBlock(0, 1)],
    ],
)
def test_what_is_not_free_is_not_taken_and_nothing_else_is(extents):
    free = FreeList(CAPACITY)
    free.take([units(4, 1), units(8, 2)])
    before = free.free_blocks()
    with pytest.raises(ValueError, match="not a free extent"):
        free.take([units(1, 1), *extents] if extents[0].start >= units(2, 0).start else extents)
    assert free.free_blocks() == before
    free.check_integrity()


@given(
    st.lists(st.tuples(st.integers(1, 3 * ALIGN_BYTES), st.booleans()), max_size=20),
    st.randoms(use_true_random=False),
)
def test_books_that_are_rebuilt_are_the_same(sizes, dice):
    first = FreeList(CAPACITY)
    blocks = [(first.allocate(size), keeps) for size, keeps in sizes]
    kept = [block for block, keeps in blocks if block is not None and keeps]
    for block, keeps in blocks:
        if block is not None and not keeps:
            first.free(block.start)
    dice.shuffle(kept)
    second = FreeList(CAPACITY)
    second.take(kept)
    second.check_integrity()
    assert (second.free_blocks(), second.used_bytes, second.num_used_blocks) == (
        first.free_blocks(),
        first.used_bytes,
        first.num_used_blocks,
    )
