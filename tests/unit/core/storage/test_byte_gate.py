"""A bound on bytes in use at once."""

from __future__ import annotations

import asyncio

from lmcache_core.storage.byte_gate import ByteGate


async def test_who_fits_is_let_in_and_the_others_wait_their_turn() -> None:
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
    await asyncio.sleep(0.01)
    assert order == ["a", "b"]
    releases["a"].set()
    await asyncio.sleep(0.01)
    assert order == ["a", "b"], "the large one is not overtaken"
    releases["b"].set()
    await asyncio.sleep(0.01)
    assert order == ["a", "b", "c", "d"]
    assert gate.used_bytes == 8
    for event in releases.values():
        event.set()
    await asyncio.gather(*tasks)
    assert gate.used_bytes == 0


async def test_one_that_is_larger_than_the_bound_goes_alone() -> None:
    gate = ByteGate(10)
    async with gate.using(1000):
        assert gate.used_bytes == 10
        waiting = asyncio.ensure_future(_enter(gate, 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
    await waiting
    assert gate.used_bytes == 0


async def test_whoever_gives_up_takes_nothing_with_it() -> None:
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


async def _enter(gate: ByteGate, num_bytes: int) -> None:
    async with gate.using(num_bytes):
        pass
