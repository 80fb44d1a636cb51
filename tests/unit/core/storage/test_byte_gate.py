"""The gate that bounds bytes in progress: first come, first served."""

from __future__ import annotations

import asyncio

from lmcache_core.storage.byte_gate import ByteGate


async def turns() -> None:
    """Let the other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


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


async def _enter(gate: ByteGate, num_bytes: int) -> None:
    async with gate.using(num_bytes):
        pass
