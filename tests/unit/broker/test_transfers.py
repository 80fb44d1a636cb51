"""Which holder serves a chunk, of those that may: `tests/property/test_broker_choice.py` has who
may.
"""

import pytest
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_core.p2p import Peer
from lmcache_core.p2p.messages import TransferResponse

from tests.fixtures.broker import (
    ACME,
    FakeClock,
    announce,
    at_once,
    peer,
    transfer_scheduler,
    wanted,
)

TTL_MS = 5_000


class World:
    """A directory and a transfer service on one clock."""

    def __init__(self, max_pulls: int = 2) -> None:
        self.clock = FakeClock()
        self.directory = PeerDirectory(PeerLimits(1000, 1000, 3_600_000), self.clock)
        self.scheduler = transfer_scheduler(
            self.directory, self.clock, max_pulls=max_pulls, ticket_ttl_ms=TTL_MS
        )

    def add(self, *peers: Peer, load: float = 0.0) -> None:
        for each in peers:
            announce(self.directory, ACME, each, load=load)

    def ask(
        self, holders_by_chunk: dict[str, list[str]], requester: str = "me"
    ) -> TransferResponse:
        return at_once(self.scheduler.ask(ACME, requester, wanted(holders_by_chunk), 0))

    def chosen(self, *holders: str, requester: str = "me") -> str:
        [pull] = self.ask({"c": list(holders)}, requester).assignments
        return pull.instance


@pytest.fixture
def world() -> World:
    return World()


def test_the_same_node_comes_first_then_the_same_zone(world: World) -> None:
    world.add(
        peer("me", node="n1", zone="z1"),
        peer("far", node="n9", zone="z9"),
        peer("zonal", node="n2", zone="z1"),
    )
    world.add(peer("near", node="n1", zone="z1"), load=1.0)
    assert world.chosen("far", "zonal", "near") == "near"
    assert world.chosen("far", "zonal") == "zonal"
    assert world.chosen("far") == "far"


def test_load_decides_where_no_place_is_known(world: World) -> None:
    """A requester that is not registered, and one whose node and zone have no name."""
    world.add(peer("me"), peer("nowhere"), load=0.5)
    world.add(peer("idle", node="n1", zone="z1"))
    assert world.chosen("nowhere", "idle", requester="unknown") == "idle"
    world.clock.now_s += TTL_MS / 1000
    assert world.chosen("nowhere", "idle") == "idle"


def test_equals_are_spread_over_requesters_and_stable_for_each() -> None:
    world = World(max_pulls=10_000)
    world.add(*(peer(f"p{i}") for i in range(4)))
    names = [f"p{i}" for i in range(4)]

    def choices() -> list[str]:
        found = []
        for i in range(40):
            found.append(world.chosen(*names, requester=f"r{i}"))
            world.clock.now_s += TTL_MS / 1000
        return found

    first = choices()
    assert first == choices()
    assert set(first) == set(names)


def test_chunks_gather_at_few_peers_and_count_as_one_pull_each(world: World) -> None:
    world.add(peer("a"), peer("b"))
    plan = world.ask(
        {
            "c1": ["a", "b"],
            "c2": ["b", "a"],
            "c3": ["a"],
            "c4": ["b"],
            "c5": ["a", "b"],
            "c6": ["unknown"],
            "c7": [],
        }
    )
    gathered = {pull.instance: list(pull.chunk_ids) for pull in plan.assignments}
    both, only = ("a", "b") if len(gathered["a"]) > len(gathered["b"]) else ("b", "a")
    only_there = {"a": "c3", "b": "c4"}
    assert sorted(gathered[both]) == sorted(["c1", "c2", "c5", only_there[both]])
    assert gathered[only] == [only_there[only]]
    assert plan.unassigned == ["c6", "c7"]
    assert [world.directory.get(ACME, name).num_pulls for name in ("a", "b")] == [1, 1]
    assert (
        world.scheduler.num_pulls,
        world.scheduler.num_assigned,
        world.scheduler.num_unassigned,
    ) == (2, 5, 2)
