"""Chunks that have moved to another server: other servers do not rely on them, and one that is
stored here again stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.remote.rendezvous import home
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.server import LmServer
from lmcache_storage.handover import rebalancer as rebalancing
from lmcache_storage.served_store import Departures

from tests.fixtures.waiting import until
from tests.suites.chunks import held_keys, make_chunk
from tests.unit.cache_storage.handover.test_moves import ADMIN, KEYS, Here, here

STRANGERS = [key for key in KEYS if home(["s-0", "s-1"], key.key.chunk_id()) == "s-1"]
pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def asked_by(made: Here) -> AsyncIterator[LmClient]:
    """A client of `made`, which may ask as another server does."""
    server = LmServer(made.store, lambda token: ADMIN, name="s-0")
    await server.open()
    client = LmClient("127.0.0.1", server.port, None, ClientOptions(timeout_s=2))
    yield client
    await client.close()
    await server.close()


async def moved(made: Here) -> None:
    """Let what belongs to others go there."""
    await made.put(KEYS)
    for _ in range(rebalancing.STEADY_LOOKS + 1):
        await made.rebalancer.look()
    assert set(made.others["s-1"].chunks) == set(STRANGERS)


async def forgotten(made: Here) -> None:
    """Let what has moved be forgotten here."""
    await asyncio.sleep(rebalancing.FORGET_AFTER_S)
    await made.rebalancer.look()


async def test_chunks_given_back_by_a_server_that_ends_stay() -> None:
    async with here("s-1") as made, asked_by(made) as ending:
        await moved(made)
        assert await ending.contains(KEYS) == [True] * len(KEYS)
        assert await ending.holds("default", KEYS) == [key not in STRANGERS for key in KEYS]
        back = [make_chunk(KEYS.index(key)) for key in STRANGERS[:3]]
        assert await ending.hand_over(back, may_evict=False) == [True] * 3
        assert await ending.holds("default", STRANGERS) == [True] * 3 + [False] * (
            len(STRANGERS) - 3
        )
        await forgotten(made)
        assert set(held_keys(made.hot)) == set(KEYS) - set(STRANGERS[3:])


async def test_a_chunk_leaves_before_its_new_home_can_know_of_it() -> None:
    async with here("s-1") as made, asked_by(made) as ending:
        await made.put(KEYS)
        made.others["s-1"].gate = asyncio.Event()
        for _ in range(rebalancing.STEADY_LOOKS):
            await made.rebalancer.look()
        moving = asyncio.create_task(made.rebalancer.look())

        async def has_left() -> bool:
            return await ending.holds("default", STRANGERS[-1:]) == [False]

        await until(has_left)
        assert not made.others["s-1"].chunks
        made.others["s-1"].gate.set()
        await moving


async def test_chunk_stored_here_again_stays() -> None:
    async with here("s-1") as made, asked_by(made) as client:
        await moved(made)
        assert await client.put([make_chunk(KEYS.index(STRANGERS[0]))]) == [True]
        await forgotten(made)
        assert set(held_keys(made.hot)) == set(KEYS) - set(STRANGERS[1:])


async def test_store_waits_for_the_removal_of_the_same_chunk_up_to_a_limit() -> None:
    leaving, key, go = Departures(), KEYS[0], asyncio.Event()
    seen: list[str] = []

    async def remove() -> None:
        await go.wait()
        seen.append("removed")

    async def store(which: ChunkKey) -> bool:
        is_stored = await leaving.stay(which)
        seen.append("stored" if is_stored else "refused")
        return is_stored

    leaving.begin([key])
    forgetting = asyncio.create_task(leaving.forget([key], remove()))
    await asyncio.sleep(0)
    assert key in leaving
    storing = asyncio.create_task(store(key))
    assert await store(KEYS[1])
    go.set()
    await asyncio.gather(forgetting, storing)
    assert seen == ["stored", "removed", "stored"]
    assert key not in leaving

    go.clear()
    forgetting = asyncio.create_task(leaving.forget([key], remove()))
    await asyncio.sleep(0)
    assert not await store(key)
    go.set()
    await forgetting
