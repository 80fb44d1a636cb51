"""The free list of an arena, against a list of bytes that are each marked with their owner."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmcache_core.memory import ALIGN_BYTES, FreeBlock, FreeList

CAPACITY = 16 * ALIGN_BYTES


def test_the_smallest_extent_that_fits_is_taken():
    free = FreeList(CAPACITY)
    taken = [free.allocate(n * ALIGN_BYTES) for n in (4, 1, 2, 1, 8)]
    free.free(taken[0].start)
    free.free(taken[2].start)
    assert free.allocate(2 * ALIGN_BYTES) == taken[2]
    assert free.allocate(3 * ALIGN_BYTES).start == taken[0].start
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


@pytest.mark.parametrize(
    "extents",
    [
        [units(1, 1), units(4, 1)],
        [units(5, 4)],
        [units(15, 2)],
        [units(-1, 1)],
        [units(0, 2), units(1, 1)],
        [units(0, 0)],
        [FreeBlock(1, ALIGN_BYTES)],
        [FreeBlock(0, 1)],
    ],
)
def test_extents_that_are_not_all_free_are_not_taken_and_nothing_is(extents):
    free = FreeList(CAPACITY)
    free.take([units(4, 1), units(8, 2)])
    before = free.free_blocks()
    with pytest.raises(ValueError, match="not a free extent"):
        free.take(extents)
    assert free.free_blocks() == before
    free.check_integrity()
