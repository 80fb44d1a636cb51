import pytest
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_core.p2p import Peer
from lmcache_core.p2p.messages import TransferResponse
from lmcache_core.security import Principal, Ticket, TicketVerifier

from tests.fixtures.broker import (
    ACME,
    KEYS,
    OPERATOR,
    RIVAL,
    FakeClock,
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

    def add(
        self, *peers: Peer, load: float = 0.0, principal: Principal = ACME, draining: bool = False
    ) -> None:
        for each in peers:
            self.directory.announce(principal, each, load=load, ttl_ms=600_000, draining=draining)

    def ask(
        self,
        holders_by_chunk: dict[str, list[str]],
        requester: str = "me",
        principal: Principal = ACME,
    ) -> TransferResponse:
        return at_once(self.scheduler.ask(principal, requester, wanted(holders_by_chunk), 0))

    def chosen(
        self, *holders: str, requester: str = "me", principal: Principal = ACME
    ) -> str | None:
        plan = self.ask({"c": list(holders)}, requester, principal)
        return plan.assignments[0].instance if plan.assignments else None


@pytest.fixture
def world() -> World:
    return World()


def test_same_node_then_zone_then_anyone(world: World) -> None:
    world.add(
        peer("me", node="n1", zone="z1"),
        peer("far", node="n9", zone="z9"),
        peer("zonal", node="n2", zone="z1"),
    )
    world.add(peer("near", node="n1", zone="z1"), load=1.0)
    assert world.chosen("far", "zonal", "near") == "near"
    assert world.chosen("far", "zonal") == "zonal"
    assert world.chosen("far") == "far"


def test_names_that_are_not_set_are_not_near(world: World) -> None:
    world.add(peer("me"), peer("nowhere"), load=0.5)
    world.add(peer("idle", node="n1", zone="z1"))
    assert world.chosen("nowhere", "idle") == "idle"


def test_a_requester_that_is_not_registered_is_served_by_load(world: World) -> None:
    world.add(peer("busy"), load=0.9)
    world.add(peer("idle"), load=0.1)
    assert world.chosen("busy", "idle") == "idle"


def test_pulls_in_flight_are_pressure_until_their_tickets_expire(world: World) -> None:
    world.add(peer("a"), peer("b"))
    first = world.chosen("a", "b")
    second = world.chosen("a", "b")
    assert {first, second} == {"a", "b"}
    world.clock.now_s += TTL_MS / 1000
    assert world.chosen("a", "b") == first


def test_a_full_peer_is_passed_over_and_then_nobody_is_left(world: World) -> None:
    world.add(peer("near", node="n1"), peer("me", node="n1"), peer("far", node="n2"))
    assert [world.chosen("near", "far") for _ in range(5)] == ["near", "near", "far", "far", None]
    world.clock.now_s += TTL_MS / 1000
    assert world.chosen("near", "far") == "near"


def test_equals_are_spread_over_requesters_and_stable_for_each(world: World) -> None:
    world = World(max_pulls=10_000)
    world.add(*(peer(f"p{i}") for i in range(4)))
    names = [f"p{i}" for i in range(4)]

    def choices() -> list[str | None]:
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
            "c6": ["nobody"],
            "c7": [],
        }
    )
    gathered = {pull.instance: list(pull.chunk_ids) for pull in plan.assignments}
    both, only = ("a", "b") if len(gathered["a"]) > len(gathered["b"]) else ("b", "a")
    alone = {"a": "c3", "b": "c4"}
    assert sorted(gathered[both]) == sorted(["c1", "c2", "c5", alone[both]])
    assert gathered[only] == [alone[only]]
    assert plan.unassigned == ["c6", "c7"]
    assert [world.directory.get(ACME, name).num_pulls for name in ("a", "b")] == [1, 1]
    assert (
        world.scheduler.num_pulls,
        world.scheduler.num_assigned,
        world.scheduler.num_unassigned,
    ) == (2, 5, 2)


def test_the_requester_the_dead_and_the_draining_are_not_chosen(world: World) -> None:
    world.add(peer("me"), peer("drained"), principal=OPERATOR)
    world.directory.drain(OPERATOR, "drained")
    world.add(peer("leaving"), draining=True)
    world.directory.announce(ACME, peer("dead"), load=0.0, ttl_ms=1_000, draining=False)
    world.clock.now_s += 1
    plan = world.ask({"c": ["me", "drained", "leaving", "dead", "unheard-of"]})
    assert plan == TransferResponse(assignments=[], unassigned=["c"], busy=[])


def test_a_ticket_names_peer_requester_and_the_callers_tenant(world: World) -> None:
    world.add(peer("shared"), principal=OPERATOR)
    (pull,) = world.ask({"c": ["shared"]}, requester="me", principal=RIVAL).assignments
    verifier = TicketVerifier(KEYS, "shared", world.clock.unix_ms)
    assert verifier.verify(pull.ticket) == Ticket("k1", "shared", "me", "rival", pull.expires_ms)
    assert pull.expires_ms == world.clock.unix_ms() + TTL_MS
    assert pull.distributed_url == "lm://shared.example:65433"


def test_another_tenants_peer_is_not_chosen(world: World) -> None:
    world.add(peer("acmes"), principal=ACME)
    assert world.chosen("acmes", principal=RIVAL) is None
    assert world.chosen("acmes", principal=ACME) == "acmes"
