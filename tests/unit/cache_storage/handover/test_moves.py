"""Moves of chunks between servers: where they go, what is counted, what stays, and that other
servers do not rely on a chunk that leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk
from lmcache_core.security import Principal
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.pin_board import PinBoard
from lmcache_core.storage.remote.members import Members, ServerAddress
from lmcache_core.storage.remote.rendezvous import home, ranked
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.served import ServerLimits
from lmcache_core.wire.server import LmServer
from lmcache_node.drain import DrainProgress, DrainState, NodeDrain
from lmcache_node.local_chunks import LocalChunks
from lmcache_storage import metrics
from lmcache_storage.handover import rebalancer as rebalancing
from lmcache_storage.handover.mover import Mover, ServerHandover
from lmcache_storage.handover.rebalancer import Rebalancer
from lmcache_storage.handover.servers import OtherServers
from lmcache_storage.served_store import Departures, StorageStore

from tests.fixtures.virtual_time import CLOCK
from tests.fixtures.waiting import until
from tests.fixtures.wire import MemoryStore
from tests.suites.chunks import held_keys, make_chunk, make_key

pytestmark = pytest.mark.virtual_time

ADMIN = Principal("default", "admin", "servers")
CLIENT = Principal("default", "client", "servers")
KEYS = [make_key(i) for i in range(40)]


def done(total: int, **figures: int) -> DrainProgress:
    return DrainProgress(total, **figures, state=DrainState.DONE)


class Taking(MemoryStore):
    """Another server: it may be full, or take nothing."""

    takes = True
    room = True
    denies = False

    def stays(self, key: ChunkKey) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.order: list[ChunkKey] = []

    def allocate(self, num_bytes: int, tenant: str = "default") -> MemoryObj | None:
        return super().allocate(num_bytes, tenant) if self.takes else None

    def has_room(self, num_bytes: int) -> bool:
        return self.room

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [False] * len(keys) if self.denies else await super().contains(keys)

    async def take_over(self, chunk: Chunk) -> bool:
        self.order.append(chunk.key)
        return await self.put(chunk)


class Here:
    """This server, `s-0`, with chunks in memory, and others."""

    def __init__(self, exits: AsyncExitStack, timeout_s: float) -> None:
        self._exits = exits
        self.others: dict[str, Taking] = {}
        self.servers: dict[str, LmServer] = {}
        self.members = Members(self._find, self._client, "test")
        self.known = OtherServers(self.members, "s-0")
        arena = ArenaAllocator.anonymous(4 << 20)
        self.hot = LocalCPUBackend(arena, create_policy("lru"))
        self.stack = TierStack(self.hot)
        self.held = LocalChunks(self.hot, None, None, 1.0, lambda key: True)
        self.counters = Counters()
        self.mover = Mover(self.held, self.known, self.counters)
        self.drain = NodeDrain(
            timeout_s, self.stack, ServerHandover(self.held, self.known, self.mover)
        )
        self.pins = PinBoard(self.stack, arena.capacity_bytes, 1.0)
        self.departures = Departures()
        self.store = StorageStore(
            self.stack, None, self.departures, lambda: True, 1.0, self.counters
        )
        self.rebalancer = Rebalancer(
            self.held, self.stack, self.known, self.mover, self.store, self.pins, lambda: True
        )

    async def start(self, *names: str) -> None:
        for name in names:
            self.others[name] = Taking()
            self.servers[name] = LmServer(
                self.others[name],
                lambda token: ADMIN,
                limits=ServerLimits(reauthenticate_s=0.0),
                name=name,
            )
            await self.servers[name].open()
            self._exits.push_async_callback(self._end, name)
        await self.members.refresh()

    async def put(self, keys: Sequence[ChunkKey], tenant: str = "default") -> None:
        for key in keys:
            chunk = make_chunk(KEYS.index(key), allocate=self.stack.allocate, tenant=tenant)
            assert await self.stack.batched_put([chunk]) == [True]
            chunk.release()

    async def look(self, times: int = rebalancing.STEADY_LOOKS + 1) -> None:
        """Look at the other servers; by default so often that chunks have moved home."""
        for _ in range(times):
            await self.rebalancer.look()

    async def forget(self) -> None:
        """Let what has moved be forgotten here."""
        await asyncio.sleep(rebalancing.FORGET_AFTER_S)
        await self.rebalancer.look()

    def counted(self, outcome: str) -> int:
        return self.counters.value(metrics.MOVED_CHUNKS_TOTAL, label=outcome)

    async def _end(self, name: str) -> None:
        await self.servers[name].close()
        self.others[name].clear()
        self.others[name].arena.check_empty()

    async def _find(self) -> list[ServerAddress]:
        return [ServerAddress("127.0.0.1", server.port, "") for server in self.servers.values()]

    def _client(self, address: ServerAddress) -> LmClient:
        return LmClient(address.host, address.port, None, ClientOptions(timeout_s=2))


@asynccontextmanager
async def here(*others: str, timeout_s: float = 10.0) -> AsyncIterator[Here]:
    async with AsyncExitStack() as exits:
        made = Here(exits, timeout_s)
        await made.start(*others)
        exits.push_async_callback(made.members.close)
        exits.callback(made.pins.close)
        exits.push_async_callback(made.drain.close)
        yield made
    await made.stack.close()
    assert made.hot.stats()["arena_used_bytes"] == 0, "a reference was not given back"


async def test_a_drain_gives_each_chunk_to_its_home_the_hottest_first() -> None:
    async with here("s-1", "s-2") as made:
        await made.put(KEYS)
        for chunk in made.hot.get_many(KEYS[5:10]):  # these are now the hottest
            assert chunk is not None
            chunk.release()
        await made.drain.run()
        assert made.drain.progress == done(40, handed_over=40)
        assert made.drain.is_complete
        for key in KEYS:
            assert [name for name, store in made.others.items() if key in store.chunks] == [
                home(["s-1", "s-2"], key.key.chunk_id())
            ]
        for name, store in made.others.items():
            hottest = {
                key for key in KEYS[5:10] if home(["s-1", "s-2"], key.key.chunk_id()) == name
            }
            assert set(store.order[: len(hottest)]) == hottest
        assert made.counted("handed_over") == 40


async def test_chunk_held_elsewhere_is_not_sent_and_a_refused_one_goes_to_the_second_choice() -> (
    None
):
    async with here("s-1", "s-2", "s-3") as made:
        await made.put(KEYS)
        made.others["s-2"].takes = False
        there = next(
            key for key in KEYS if home(["s-1", "s-2", "s-3"], key.key.chunk_id()) == "s-1"
        )
        await made.others["s-1"].put(
            make_chunk(KEYS.index(there), allocate=made.others["s-1"].arena)
        )
        made.others["s-1"].chunks[there].release()
        await made.drain.run()
        assert made.drain.progress == done(40, handed_over=39, already_elsewhere=1)
        for key in KEYS:
            first, second, _ = ranked(made.others, key.key.chunk_id())
            assert key in made.others[second if first == "s-2" else first].chunks


async def test_only_the_hotter_half_evicts_others() -> None:
    async with here("s-1") as made:
        await made.put(KEYS)
        made.others["s-1"].room = False
        await made.drain.run()
        assert made.drain.progress == done(40, handed_over=20, failed=20)
        assert set(made.others["s-1"].chunks) == set(KEYS[20:])  # the last ones that were used
        made.others["s-1"].room = True
        await made.drain.run()  # it has left something, so that it tries again
        assert made.drain.progress == done(40, handed_over=20, already_elsewhere=20)


async def test_drain_ends_in_time_though_a_server_hangs() -> None:
    async with here("s-1", timeout_s=0.5) as made:
        await made.put(KEYS)
        made.others["s-1"].gate = asyncio.Event()
        began_s = CLOCK()
        await made.drain.run()
        assert CLOCK() - began_s == pytest.approx(0.5, abs=0.1)
        assert made.drain.progress.state is DrainState.DONE
        assert (made.drain.progress.total, made.drain.progress.left) == (40, 40)
        made.others["s-1"].gate.set()


@pytest.mark.parametrize("tenant", ["default", "rival"])
async def test_chunks_move_home_when_servers_are_stable_and_are_dropped_later(tenant: str) -> None:
    async with here("s-1") as made:
        await made.put(KEYS, tenant)
        keys = [ChunkKey.of(tenant, key.key) for key in KEYS]
        strangers = [key for key in keys if home(["s-0", "s-1"], key.key.chunk_id()) == "s-1"]
        pinned = strangers[0]
        await made.pins.pin([pinned], 60)
        for _ in range(rebalancing.STEADY_LOOKS):
            await made.rebalancer.look()
            assert not made.others["s-1"].chunks, "the servers may still change"
        await made.rebalancer.look()
        assert set(made.others["s-1"].chunks) == {*strangers} - {pinned}
        assert made.hot.contains_many(keys) == [True] * 40, "readers may still ask here"
        await made.forget()
        assert set(held_keys(made.hot)) == {*keys} - {*strangers} | {pinned}


async def test_chunk_pinned_while_its_home_is_asked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with here("s-1") as made:
        await made.put(KEYS)
        await made.look()
        moved = sorted(made.others["s-1"].chunks, key=KEYS.index)
        contains = made.others["s-1"].contains

        async def contains_later(keys: Sequence[ChunkKey]) -> list[bool]:
            if moved[0] in keys:
                assert not await made.pins.pin(moved[:1], 60)
            return await contains(keys)

        monkeypatch.setattr(made.others["s-1"], "contains", contains_later)
        await made.forget()
        assert moved[0] in made.pins
        assert set(held_keys(made.hot)) == set(KEYS) - set(moved[1:])


@pytest.mark.parametrize(
    ("tenant", "why"),
    [
        ("default", "says that it is gone"),
        ("rival", "says that it is gone"),
        ("rival", "refuses our role"),
        ("default", "is gone itself"),
    ],
)
async def test_chunk_that_its_home_does_not_confirm_is_kept(tenant: str, why: str) -> None:
    """That it stored the chunk does not count; its answer before the chunk is dropped does."""
    async with here("s-1") as made:
        keys = [ChunkKey.of(tenant, key.key) for key in KEYS]
        await made.put(KEYS, tenant)
        await made.look()
        moved = set(made.others["s-1"].chunks)
        assert moved
        if why == "says that it is gone":
            made.others["s-1"].denies = True
        elif why == "refuses our role":
            made.servers["s-1"].authenticate = lambda token: CLIENT
        else:
            await made.servers["s-1"].close()
        await made.forget()
        assert set(held_keys(made.hot)) == set(keys)


async def test_chunk_without_room_at_home_stays() -> None:
    async with here("s-1") as made:
        await made.put(KEYS)
        made.others["s-1"].room = False
        await made.look(rebalancing.STEADY_LOOKS + 2)
        assert not made.others["s-1"].chunks
        assert made.hot.contains_many(KEYS) == [True] * 40
        assert not any(key in made.departures for key in KEYS)


async def test_chunk_that_arrives_at_the_wrong_server_moves_on() -> None:
    async with here("s-1") as made:
        await made.look()
        stranger = next(key for key in KEYS if home(["s-0", "s-1"], key.key.chunk_id()) == "s-1")
        chunk = make_chunk(KEYS.index(stranger), allocate=made.stack.allocate)
        assert await made.store.take_over(chunk)
        chunk.release()
        await made.look()
        assert set(made.others["s-1"].chunks) == {stranger}


STRANGERS = [key for key in KEYS if home(["s-0", "s-1"], key.key.chunk_id()) == "s-1"]


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
    await made.look()
    assert set(made.others["s-1"].chunks) == set(STRANGERS)


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
        await made.forget()
        assert set(held_keys(made.hot)) == set(KEYS) - set(STRANGERS[3:])


async def test_a_chunk_leaves_before_its_new_home_can_know_of_it() -> None:
    async with here("s-1") as made, asked_by(made) as ending:
        await made.put(KEYS)
        made.others["s-1"].gate = asyncio.Event()
        await made.look(rebalancing.STEADY_LOOKS)
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
        await made.forget()
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
