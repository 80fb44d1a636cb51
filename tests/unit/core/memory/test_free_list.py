"""The free list of an arena. Against a model: `tests/property/test_allocator_model.py`."""

from __future__ import annotations

import pytest
from lmcache_core.errors import IntegrityError
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


@pytest.mark.parametrize("start", [ALIGN_BYTES, 1, -1, CAPACITY])
def test_only_the_start_of_a_used_extent_can_be_freed(start):
    free = FreeList(CAPACITY)
    assert free.allocate(2 * ALIGN_BYTES).start == 0
    with pytest.raises(IntegrityError):
        free.free(start)
    free.free(0)
    with pytest.raises(IntegrityError):
        free.free(0)
    free.check_integrity()
