"""What every chunk store does with tickets: the embedded one, and that of a sidecar at the other
end of a socket.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from lmcache_core.concurrency import LoopThread
from lmcache_core.engine import ChunkStore
from lmcache_core.keys import ChunkChain
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record import Staged
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.manager import StorageManager
from lmcache_core.telemetry import Counters

from tests.fixtures.chains import (
    TAKEN_BYTES,
    Shelf,
    chain_of,
    keys_by_chunk,
    keys_of_rank,
    names_of,
    num_loaded,
    store_chunks,
)
from tests.fixtures.embedded import noting_parts, until
from tests.fixtures.frames import HELLO
from tests.fixtures.kv import make_config
from tests.fixtures.sidecar import running_socket, unhurried_clients

ARENA_BYTES = 64 * TAKEN_BYTES
DEADLINE_S, PATIENCE_S = 1.0, 20.0


@dataclass
class Open:
    """A store and its tiers."""

    store: ChunkStore
    hot: LocalCPUBackend
    shelf: Shelf
    loop: LoopThread | None = None

    def keep_on_shelf_alone(self, chain: ChunkChain) -> None:
        keys = keys_by_chunk(chain)
        assert store_chunks(self.store, keys) == len(keys)
        until(lambda: self.shelf.held >= set(names_of(keys)), "chunks are not written below")
        self.hot.clear_now()

    def settled(self, ticket: str, chain: ChunkChain) -> Staged:
        found: list[Staged] = []

        def is_ready() -> bool:
            staged = self.store.stage(ticket, [chain])
            assert staged is not None
            found.append(staged)
            return staged.is_ready

        until(is_ready, "the lift does not end")
        return found[-1]


@contextlib.contextmanager
def embedded(directory: Path) -> Iterator[Open]:
    allocator, shelf = HostMemoryAllocator(ARENA_BYTES), Shelf()
    with noting_parts(lambda tiers: replace(tiers, lower=(shelf,), written=(shelf,))) as parts:
        manager = StorageManager(make_config(tier_timeout_s=DEADLINE_S), allocator, Counters())
        manager.open(lambda salt: None)
    try:
        yield Open(manager, parts.hot, shelf, parts.loop)
    finally:
        manager.close()
    until(lambda: allocator.used_bytes == 0, "a reference was not given back")
    allocator.check_integrity()


@contextlib.contextmanager
def behind_sidecar(directory: Path) -> Iterator[Open]:
    shelf = Shelf()
    with running_socket(directory, ARENA_BYTES, lower=[shelf]) as running:
        store = SidecarChunkStore(running.path, HELLO, PATIENCE_S, Counters())
        with unhurried_clients():
            store.open(lambda salt: None)
            try:
                yield Open(store, running.hot, shelf)
            finally:
                store.close()


@pytest.fixture(params=[embedded, behind_sidecar], ids=["embedded", "sidecar"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    make: Callable[[Path], contextlib.AbstractContextManager[Open]] = request.param
    with make(tmp_path) as found:
        yield found


def num_left(opened: Open) -> int:
    """How many chunks cannot be evicted; a sidecar hears of tickets that are given back a little
    later.
    """
    opened.hot.evict_bytes(ARENA_BYTES)
    return opened.hot.stats()["num_chunks"]


def test_what_is_hot_is_ready_at_once_and_can_be_loaded(opened: Open) -> None:
    chain = chain_of(range(5))
    assert store_chunks(opened.store, keys_of_rank(chain, 0)) == 5
    assert opened.store.stage("t", [chain]) == Staged(True, (b"\1" * 5,))
    assert num_loaded(opened.store, keys_of_rank(chain, 0)) == 5
    opened.store.unstage(["t"])


def test_a_chunk_is_there_when_all_ranks_have_stored_it(opened: Open) -> None:
    chain = chain_of(range(3), world_size=2)
    store_chunks(opened.store, keys_of_rank(chain, 0))
    assert opened.settled("t", chain).tiers == (b"\0\0\0",)
    store_chunks(opened.store, keys_of_rank(chain, 1)[:2])
    opened.store.unstage(["t"])
    assert opened.settled("t", chain).tiers == (b"\1\1\0",)


def test_a_window_counts_chunk_by_chunk(opened: Open) -> None:
    chain = chain_of(range(4))
    keys = keys_of_rank(chain, 0)
    store_chunks(opened.store, [keys[1], keys[3]])
    opened.shelf.hangs = True
    staged = opened.store.stage("t", [chain], is_prefix=False)
    assert staged is not None
    assert staged.tiers == (b"\0\1\0\1",)
    opened.shelf.hangs = False


def test_several_chains_are_one_question(opened: Open) -> None:
    full, window = chain_of(range(4)), chain_of(range(4), group="window")
    store_chunks(opened.store, [*keys_of_rank(full, 0)[:3], *keys_of_rank(window, 0)[:1]])
    staged = opened.store.stage("t", [full, window, chain_of([])])
    assert staged is not None
    assert staged.tiers == (b"\1\1\1\0", b"\1\0\0\0", b"")


def test_chunks_of_slower_tiers_are_lifted_in_the_background(opened: Open) -> None:
    chain = chain_of(range(6), world_size=2)
    opened.keep_on_shelf_alone(chain)
    assert opened.store.stage("t", [chain]) is not None
    assert opened.settled("t", chain).tiers == (b"\2" * 6,)
    opened.shelf.hangs = True
    assert num_loaded(opened.store, keys_of_rank(chain, 1)) == 6
    opened.shelf.hangs = False


def test_a_hanging_tier_is_not_waited_for(opened: Open) -> None:
    chain = chain_of(range(4))
    store_chunks(opened.store, keys_of_rank(chain, 0)[:2])
    opened.shelf.hangs = True
    for _ in range(3):
        assert opened.store.stage("t", [chain]) == Staged(False, (b"\1\1\0\0",))
    assert opened.settled("t", chain).tiers == (b"\1\1\0\0",)
    opened.shelf.hangs = False


def test_what_was_promised_stays_until_it_is_given_back(opened: Open) -> None:
    chain = chain_of(range(20))
    store_chunks(opened.store, keys_of_rank(chain, 0))
    assert opened.store.stage("t", [chain]) == Staged(True, (b"\1" * 20,))
    for turn in range(1, 6):
        store_chunks(opened.store, keys_of_rank(chain_of(range(1000 * turn, 1000 * turn + 25)), 0))
    until(
        lambda: all(opened.hot.contains_many(names_of(keys_of_rank(chain, 0)))),
        "a promise was not kept",
    )
    opened.hot.evict_bytes(ARENA_BYTES)
    assert opened.hot.contains_many(names_of(keys_of_rank(chain, 0))) == [True] * 20
    opened.store.unstage(["unknown", "t"])
    until(lambda: num_left(opened) == 0, "what is given back is kept")


def test_a_ticket_may_have_any_name_and_a_chain_any_length(opened: Open) -> None:
    chain = chain_of(range(70_000))
    store_chunks(opened.store, keys_of_rank(chain, 0)[:3])
    until(lambda: len(opened.shelf.held) == 3, "chunks are not written below")
    opened.shelf.hangs = True
    for ticket in ("x" * 5000, "", "\ud800", "\N{SNOWMAN}"):
        staged = opened.store.stage(ticket, [chain])
        assert staged is not None
        assert staged.tiers == (b"\1\1\1" + bytes(69_997),)
    opened.store.unstage(["x" * 5000, "", "\ud800", "\N{SNOWMAN}"])
    until(lambda: num_left(opened) == 0, "what is given back is kept")
    opened.shelf.hangs = False


def test_a_store_that_is_closed_promises_nothing(opened: Open) -> None:
    chain = chain_of(range(2))
    store_chunks(opened.store, keys_of_rank(chain, 0))
    opened.store.stage("t", [chain])
    opened.store.close()
    assert opened.store.stage("t", [chain]) is None
    opened.store.unstage(["t"])


def test_an_embedded_store_does_not_need_its_loop_for_what_is_hot(tmp_path: Path) -> None:
    chain = chain_of(range(4))
    with embedded(tmp_path) as opened:
        store_chunks(opened.store, keys_of_rank(chain, 0))
        may_end = threading.Event()

        async def occupy() -> None:
            may_end.wait()

        assert opened.loop is not None
        occupied = opened.loop.submit(occupy())
        try:
            assert opened.store.stage("t", [chain]) == Staged(True, (b"\1" * 4,))
            opened.store.unstage(["t"])
        finally:
            may_end.set()
        occupied.result(PATIENCE_S)
