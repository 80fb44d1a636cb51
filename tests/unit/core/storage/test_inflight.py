"""Reads in progress: others wait for them, and they do not bring back removed chunks; and the gate
that bounds bytes in progress.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.storage.stack import InflightReads

from tests.suites.chunks import make_key

A, B, C = (make_key(name) for name in "abc")


async def turns() -> None:
    """Let the other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def reads() -> InflightReads:
    return InflightReads()


async def test_every_read_of_a_chunk_is_waited_for(reads: InflightReads) -> None:
    with reads.reading([B, C]):
        with reads.reading([A]):
            waiting = asyncio.create_task(reads.wait_for_others([A, B], 60.0))
            await asyncio.sleep(0)
        await turns()
        assert not waiting.done(), "the other one still reads"
    assert await waiting
    assert not await reads.wait_for_others([A], 60.0), "no task reads it"


@pytest.mark.virtual_time
@pytest.mark.parametrize("timeout_s", [3600.0, 0.0, -1.0])
async def test_wait_ends_at_its_limit(reads: InflightReads, timeout_s: float) -> None:
    now = asyncio.get_running_loop().time
    began = now()
    with reads.reading([A]):
        assert await reads.wait_for_others([A], timeout_s)
    assert now() - began == pytest.approx(max(timeout_s, 0.0), abs=1e-3)


async def test_removed_chunks_are_unwanted_from_reads_before_and_during_the_removal(
    reads: InflightReads,
) -> None:
    with ExitStack() as contexts:
        before = contexts.enter_context(reads.reading([A, B]))
        with reads.removing({A}.__contains__):
            amid = contexts.enter_context(reads.reading([A, C]))
            with reads.removing({C}.__contains__):
                pass
        after = contexts.enter_context(reads.reading([A, B, C]))
    assert (before.unwanted, amid.unwanted, after.unwanted) == ({A}, {A, C}, set())


async def test_failed_removal_ends_too(reads: InflightReads) -> None:
    with pytest.raises(LookupError), reads.removing({A}.__contains__):
        raise LookupError
    with reads.reading([A]) as read:
        assert read.unwanted == set()


async def test_gate_admits_in_order() -> None:
    gate, order = ByteGate(10), []
    releases = {name: asyncio.Event() for name in "abcd"}

    async def use(name: str, num_bytes: int) -> None:
        async with gate.using(num_bytes):
            order.append(name)
            await releases[name].wait()

    tasks = [
        asyncio.ensure_future(use(name, size))
        for name, size in (("a", 4), ("b", 6), ("c", 7), ("d", 1))
    ]
    await turns()
    assert order == ["a", "b"]
    releases["a"].set()
    await turns()
    assert order == ["a", "b"], "the large one is not overtaken"
    releases["b"].set()
    await turns()
    assert order == ["a", "b", "c", "d"]
    assert gate.used_bytes == 8
    for event in releases.values():
        event.set()
    await asyncio.gather(*tasks)
    assert gate.used_bytes == 0


async def test_gate_admits_one_larger_than_its_bound_alone() -> None:
    gate = ByteGate(10)
    async with gate.using(1000):
        assert gate.used_bytes == 10
        waiting = asyncio.ensure_future(_enter(gate, 1))
        await turns()
        assert not waiting.done()
    await waiting
    assert gate.used_bytes == 0


async def test_cancelled_waiter_takes_nothing() -> None:
    gate = ByteGate(10)
    async with gate.using(10):
        impatient, patient = (asyncio.ensure_future(_enter(gate, size)) for size in (10, 3))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
    await patient
    async with gate.using(10):
        chosen = asyncio.ensure_future(_enter(gate, 10))
        await asyncio.sleep(0)
    chosen.cancel()  # in the moment in which its turn had come
    await asyncio.wait([chosen])
    assert gate.used_bytes == 0
    await _enter(gate, 10)


async def test_cancelled_waiter_lets_smaller_ones_pass() -> None:
    gate = ByteGate(10)
    async with gate.using(6):
        large, small = (asyncio.ensure_future(_enter(gate, size)) for size in (9, 3))
        await asyncio.sleep(0)
        large.cancel()
        async with asyncio.timeout(60):
            await small
        assert gate.used_bytes == 6
    assert gate.used_bytes == 0


async def _enter(gate: ByteGate, num_bytes: int) -> None:
    async with gate.using(num_bytes):
        pass
