"""Chunks that are pulled often get further copies."""

from typing import Any

import pytest
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_broker.transfers import hot as module
from lmcache_broker.transfers.hot import ORDER_TTL_S, WINDOW_S, HotChunks, HotLimits
from lmcache_core.p2p import CopyOrder
from lmcache_core.p2p.messages import ChunkHolders
from lmcache_core.security import Principal

from tests.fixtures.broker import (
    ACME,
    RIVAL,
    FakeClock,
    announce,
    at_once,
    peer,
    transfer_scheduler,
)

CHUNK = "0" * 32


class World:
    def __init__(self, *names: str, num_pulls: int = 3, num_copies: int = 2) -> None:
        self.clock = FakeClock()
        self.directory = PeerDirectory(PeerLimits(100, 100, 3_600_000), self.clock)
        self.scheduler = transfer_scheduler(
            self.directory, self.clock, max_pulls=100, ticket_ttl_ms=1_000
        )
        self.hot = HotChunks(self.directory, HotLimits(num_pulls, num_copies))
        for name in names:
            self.add(name)

    def add(self, name: str, zone: str = "", who: Principal = ACME, **status: Any) -> None:
        announce(self.directory, who, peer(name, zone=zone), **status)

    def pull(
        self, *holders: str, requester: str = "me", who: Principal = ACME, chunk_id: str = CHUNK
    ) -> None:
        wanted = {chunk_id: ChunkHolders(chunk_id, list(holders))}
        self.hot.note(
            who,
            requester,
            wanted,
            at_once(self.scheduler.ask(who, requester, wanted, 0)),
            self.clock(),
        )

    def orders(self, name: str = "a", who: Principal = ACME) -> list[str]:
        return [order.instance for order in self.hot.orders_for(who, name, self.clock())]


def test_a_chunk_is_hot_after_so_many_pulls_within_a_minute() -> None:
    world = World("a", "b")
    for _ in range(2):
        world.pull("a")
        assert world.orders() == []
    world.clock.now_s += WINDOW_S + 1
    world.pull("a")
    world.pull("a")
    assert world.orders() == [], "those of the minute before do not count"
    world.pull("a")
    assert world.hot.orders_for(ACME, "a", world.clock()) == [
        CopyOrder(CHUNK, "b", "lm://b.example:65433")
    ]
    assert world.orders() == [], "each order is given once"


def test_a_holder_with_a_chunk_in_two_tiers_is_one() -> None:
    world = World("a")
    world.pull("a", "a")
    (hot,) = world.hot.hottest(ACME.tenant, 5, world.clock())
    assert hot.num_holders == 2, "with the one that pulls"


def test_copies_go_to_zones_without_one_then_to_the_least_loaded() -> None:
    world = World(num_pulls=1, num_copies=3)
    world.add("a", zone="z1")
    world.add("near", zone="z1")
    world.add("far-busy", zone="z2", load=0.9)
    world.add("far-idle", zone="z2", load=0.1)
    world.add("leaving", zone="z2", draining=True)
    world.add("rivals", zone="z2", who=RIVAL)
    world.pull("a")
    assert world.orders() == ["far-idle", "far-busy"]
    world.add("me", zone="z2")
    world.pull("a", chunk_id="1" * 32)
    assert world.orders() == ["near"], "the requester will have it anyway"


def test_enough_holders_are_enough() -> None:
    world = World("a", "b", "c", num_pulls=1, num_copies=2)
    world.pull("a", "b")
    assert world.orders("a") == world.orders("b") == []
    world.pull("a", "gone", chunk_id="1" * 32)
    assert world.orders("a") == ["b"], "the dead do not count as holders"


def test_order_that_is_not_fetched_expires_and_is_made_again() -> None:
    world = World("a", "b", num_pulls=1)
    world.pull("a")
    world.clock.now_s += ORDER_TTL_S
    assert world.orders() == []
    world.pull("a")
    assert world.orders() == ["b"]


def test_answer_orders_a_bounded_number_of_copies() -> None:
    world = World("a", "b", num_pulls=1)
    for number in range(65):
        world.pull("a", chunk_id=f"{number:032x}")
    assert [len(world.orders()) for _ in range(3)] == [64, 1, 0]


def test_pulls_are_counted_by_tenant() -> None:
    world = World(num_pulls=2)
    for who in (ACME, RIVAL):
        for name in "ab":
            world.add(name, who=who)
        world.pull("a", who=who)
    world.pull("a", who=RIVAL)
    assert (world.orders(who=ACME), world.orders(who=RIVAL)) == ([], ["b"])


def test_nothing_is_hot_where_it_is_off_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_COUNTED_CHUNKS", 2)
    monkeypatch.setattr(module, "MAX_ORDERS", 1)
    off, on = World("a", "b", num_pulls=0), World("a", "b", num_pulls=2)
    for world in (off, on):
        for chunk_id in ("1" * 32, "2" * 32, "3" * 32, "1" * 32):
            world.pull("a", chunk_id=chunk_id)
    assert off.orders() == []
    assert on.orders() == [], "the first was forgotten before it came again"
    for chunk_id in ("1" * 32, "3" * 32):
        on.pull("a", chunk_id=chunk_id)
    assert len(on.orders()) == 1
