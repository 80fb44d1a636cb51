"""Reads on their way up: waited for by others, and without effect on what is removed meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from lmcache_core.storage.lifts import Lifts
from lmcache_core.testing.chunks import make_key

A, B, C = (make_key(name) for name in "abc")


@pytest.fixture
def lifts() -> Lifts:
    return Lifts()


async def test_nobody_is_waited_for_when_nobody_reads_it(lifts: Lifts) -> None:
    assert not await lifts.wait_for_others([A], 5.0)
    lifts.begin([B, C])
    assert not await lifts.wait_for_others([A], 5.0)


async def test_whoever_reads_it_is_waited_for(lifts: Lifts) -> None:
    first, second = lifts.begin([A]), lifts.begin([B, C])
    waiting = asyncio.create_task(lifts.wait_for_others([A, B], 5.0))
    await asyncio.sleep(0)
    lifts.end(first)
    await asyncio.sleep(0)
    assert not waiting.done(), "the other one still reads"
    lifts.end(second)
    assert await waiting


@pytest.mark.parametrize("timeout_s", [0.02, 0.0, -1.0])
async def test_not_longer_than_told(lifts: Lifts, timeout_s: float) -> None:
    lifts.begin([A])
    begin = asyncio.get_running_loop().time()
    assert await lifts.wait_for_others([A], timeout_s)
    assert asyncio.get_running_loop().time() - begin < 2.0


async def test_what_is_removed_is_not_wanted_from_lifts_on_their_way_nor_from_those_that_begin(
    lifts: Lifts,
) -> None:
    before = lifts.begin([A, B])
    with lifts.removing({A}.__contains__):
        amid = lifts.begin([A, C])
        with lifts.removing({C}.__contains__):
            pass
    after = lifts.begin([A, B, C])
    assert before.unwanted == {A}
    assert amid.unwanted == {A, C}
    assert after.unwanted == set()


async def test_a_removal_that_fails_ends_too(lifts: Lifts) -> None:
    with pytest.raises(LookupError), lifts.removing({A}.__contains__):
        raise LookupError
    assert lifts.begin([A]).unwanted == set()


async def test_two_removals_of_the_same_chunk_are_two(lifts: Lifts) -> None:
    is_unwanted = {A}.__contains__
    with lifts.removing(is_unwanted):
        with lifts.removing(is_unwanted):
            pass
        assert lifts.begin([A]).unwanted == {A}
