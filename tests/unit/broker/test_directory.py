"""What a broker knows of peers; `tests/property/test_broker_choice.py` has leases, drains and who
sees whom.
"""

import pytest
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_broker.peers.record import SharedPeer
from lmcache_core.errors import CapacityError
from lmcache_core.p2p import Lease, Peer
from lmcache_core.security import Principal

from tests.fixtures.broker import ACME, OPERATOR, RIVAL, FakeClock, peer


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def directory(clock: FakeClock) -> PeerDirectory:
    return PeerDirectory(
        PeerLimits(max_peers=4, max_peers_per_owner=2, max_lease_ttl_ms=10_000), clock
    )


def announce(
    directory: PeerDirectory,
    who: Peer,
    principal: Principal = ACME,
    ttl_ms: int = 5_000,
    draining: bool = False,
) -> Lease:
    return directory.announce(principal, who, load=0.0, ttl_ms=ttl_ms, draining=draining)


def test_a_renewal_takes_new_facts(directory: PeerDirectory) -> None:
    announce(directory, peer("a", zone="z1"))
    directory.announce(ACME, peer("a", zone="z2", port=7), load=0.5, ttl_ms=1_000, draining=False)
    status = directory.get(ACME, "a")
    assert (status.zone, status.distributed_url, status.load, status.expires_in_ms) == (
        "z2",
        "lm://a.example:7",
        0.5,
        1_000,
    )


def test_bounds(directory: PeerDirectory, clock: FakeClock) -> None:
    announce(directory, peer("a"), ACME)
    announce(directory, peer("b"), ACME)
    with pytest.raises(CapacityError, match="max_peers_per_tenant"):
        announce(directory, peer("c"), ACME)
    announce(directory, peer("a"), RIVAL)
    announce(directory, peer("a"), OPERATOR)
    with pytest.raises(CapacityError, match=r"max_peers \(4\)"):
        announce(directory, peer("b"), RIVAL)
    announce(directory, peer("a"), ACME, ttl_ms=10_000)
    clock.now_s += 5
    announce(directory, peer("c"), ACME)
    assert [status.id for status in directory.visible(ACME)] == ["a", "c"]


def test_leases_that_ran_out_are_counted_and_those_that_were_ended_are_not(
    directory: PeerDirectory, clock: FakeClock
) -> None:
    announce(directory, peer("a"), ACME)
    announce(directory, peer("b"), RIVAL, draining=True)
    announce(directory, peer("c"), RIVAL)
    directory.remove(RIVAL, "c")
    assert [(seen.id, seen.draining) for seen in directory.visible()] == [("a", False), ("b", True)]
    clock.now_s += 60
    assert directory.visible() == []
    assert directory.num_expired == 2


SERVERS = Principal("default", "storage", "servers")


def test_a_registered_sidecar_does_not_hide_a_listed_storage_server(
    directory: PeerDirectory,
) -> None:
    listed = Peer("s", 0, "lm://s.example:65432", "storage")
    directory.sight("default", listed, 60.0)
    announce(directory, peer("s"), ACME)
    directory.sight("default", listed, 60.0)
    assert [seen.kind for seen in directory.visible(SERVERS)] == ["storage"]


def shared(name: str, *, num_pulls: int = 0, draining: bool = False) -> SharedPeer:
    return SharedPeer("acme", peer(name), 0.5, draining, 5_000, num_pulls)


def test_shared_peers_replace_what_this_broker_knew(
    directory: PeerDirectory, clock: FakeClock
) -> None:
    announce(directory, peer("a"))
    announce(directory, peer("b"))
    directory.drain(ACME, "b")
    directory.sight("*", Peer("c", 0, "lm://c.example:1"), 60.0)
    clock.now_s += 1
    directory.replace([shared("b", num_pulls=2), shared("d")], clock())
    found = {seen.id: seen for seen in directory.visible(ACME)}
    assert set(found) == {"b", "c", "d"}, "a has left elsewhere; sightings are this broker's own"
    assert (found["b"].num_pulls, found["b"].draining) == (2, True), "a drain lasts"
    directory.forget_shared_pulls()
    assert directory.get(ACME, "b").num_pulls == 0


def test_announcement_during_a_read_is_newer_than_what_is_read(
    directory: PeerDirectory, clock: FakeClock
) -> None:
    began_s = clock()
    clock.now_s += 1
    announce(directory, peer("a", incarnation=2))
    directory.replace([shared("a")], began_s)
    assert directory.get(ACME, "a").incarnation == 2
    directory.replace([], began_s)
    assert directory.get(ACME, "a").incarnation == 2
