import pytest
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_broker.peers.record import SharedPeer
from lmcache_core.errors import CapacityError
from lmcache_core.p2p import Lease, Peer
from lmcache_core.security import Principal
from lmcache_servicekit.errors import ConflictError, NotFoundError, PermissionDeniedError

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


def test_a_lease_ends_unless_renewed(directory: PeerDirectory, clock: FakeClock) -> None:
    assert announce(directory, peer("a")) == Lease(5_000, False)
    clock.now_s += 4.999
    assert directory.get(ACME, "a").expires_in_ms == 1
    announce(directory, peer("a"))
    clock.now_s += 4.999
    assert directory.find(ACME, "a") is not None
    clock.now_s += 0.001
    assert directory.find(ACME, "a") is None
    assert directory.visible(ACME) == []
    with pytest.raises(NotFoundError, match="no live peer a"):
        directory.get(ACME, "a")
    assert directory.num_expired == 1


def test_a_long_lease_is_cut(directory: PeerDirectory) -> None:
    assert announce(directory, peer("a"), ttl_ms=3_600_000).ttl_ms == 10_000


def test_remove_ends_a_lease_and_is_idempotent(directory: PeerDirectory) -> None:
    announce(directory, peer("a"))
    directory.remove(ACME, "a")
    directory.remove(ACME, "a")
    assert directory.find(ACME, "a") is None
    assert directory.num_expired == 0


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


def test_an_older_incarnation_is_refused_while_the_newer_one_lives(
    directory: PeerDirectory, clock: FakeClock
) -> None:
    announce(directory, peer("a", incarnation=2))
    with pytest.raises(ConflictError, match="incarnation 2 is registered"):
        announce(directory, peer("a", incarnation=1))
    clock.now_s += 5
    assert announce(directory, peer("a", incarnation=1)).draining is False


def test_a_drain_lasts_for_the_incarnation(directory: PeerDirectory) -> None:
    announce(directory, peer("a"), OPERATOR)
    assert directory.drain(OPERATOR, "a").draining
    assert announce(directory, peer("a"), OPERATOR).draining
    assert not announce(directory, peer("a", incarnation=2), OPERATOR).draining
    assert announce(directory, peer("a", incarnation=2), OPERATOR, draining=True).draining
    assert announce(directory, peer("a", incarnation=2), OPERATOR).draining


def test_a_new_incarnation_has_no_pulls(directory: PeerDirectory, clock: FakeClock) -> None:
    announce(directory, peer("a"))
    record = directory.find(ACME, "a")
    assert record is not None
    record.pulls["p"] = clock() + 2
    record.pulls["q"] = clock() + 3
    assert record.num_pulls(clock()) == 2
    assert record.num_pulls(clock() + 2) == 1
    announce(directory, peer("a", incarnation=2))
    assert directory.get(ACME, "a").num_pulls == 0


def test_tenants_neither_see_nor_touch_one_another(directory: PeerDirectory) -> None:
    announce(directory, peer("a", incarnation=9), ACME)
    assert directory.visible(RIVAL) == []
    with pytest.raises(NotFoundError):
        directory.get(RIVAL, "a")
    with pytest.raises(NotFoundError):
        directory.drain(Principal("rival", "admin", "root"), "a")
    directory.remove(RIVAL, "a")
    announce(directory, peer("a", port=666), RIVAL)
    assert directory.get(ACME, "a").distributed_url == "lm://a.example:65433"
    assert directory.get(RIVAL, "a").distributed_url == "lm://a.example:666"


def test_shared_peers_serve_all_and_a_tenants_own_comes_first(directory: PeerDirectory) -> None:
    announce(directory, peer("a", port=1), OPERATOR)
    announce(directory, peer("a", port=2), ACME)
    assert directory.get(ACME, "a").distributed_url == "lm://a.example:2"
    assert directory.get(RIVAL, "a").distributed_url == "lm://a.example:1"
    directory.remove(ACME, "a")
    assert directory.get(ACME, "a").distributed_url == "lm://a.example:1"
    directory.remove(ACME, "a")
    assert directory.find(RIVAL, "a") is not None


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


def test_expired_peers_are_counted(directory: PeerDirectory, clock: FakeClock) -> None:
    announce(directory, peer("a"), ACME)
    announce(directory, peer("b"), RIVAL, draining=True)
    assert [(seen.id, seen.draining) for seen in directory.visible()] == [("a", False), ("b", True)]
    clock.now_s += 60
    assert directory.visible() == []
    assert directory.num_expired == 2


SERVERS = Principal("default", "storage", "servers")


def storage(peer_id: str, port: int = 65432) -> Peer:
    return Peer(peer_id, 1, f"lm://{peer_id}.example:{port}", "storage")


@pytest.mark.parametrize(
    ("principal", "who", "may"),
    [
        (ACME, peer("a"), True),
        (ACME, storage("a"), False),
        (SERVERS, storage("a"), True),
        (SERVERS, peer("a"), False),
        (OPERATOR, peer("a"), True),
        (OPERATOR, storage("a"), True),
    ],
)
def test_roles_register_their_own_kind(
    directory: PeerDirectory, principal: Principal, who: Peer, may: bool
) -> None:
    if may:
        announce(directory, who, principal)
    else:
        with pytest.raises(PermissionDeniedError, match=f"kind={who.kind}.*role"):
            announce(directory, who, principal)
    assert bool(directory.records()) == may


def test_storage_servers_serve_every_tenant_and_no_client_takes_their_place(
    directory: PeerDirectory,
) -> None:
    announce(directory, storage("s"), SERVERS)
    announce(directory, peer("s", incarnation=9), ACME)
    directory.remove(ACME, "s")
    for principal in (ACME, RIVAL, SERVERS):
        assert [(seen.id, seen.kind) for seen in directory.visible(principal)] == [("s", "storage")]


@pytest.mark.parametrize("owner", ["*", "default"])
def test_a_registered_sidecar_does_not_hide_a_listed_storage_server(
    directory: PeerDirectory, owner: str
) -> None:
    listed = Peer("s", 0, "lm://s.example:65432", "storage")
    directory.sight(owner, listed, 60.0)
    announce(directory, peer("s"), ACME)
    directory.sight(owner, listed, 60.0)
    assert [seen.kind for seen in directory.visible(SERVERS)] == ["storage"]


def shared(name: str, *, num_pulls: int = 0, draining: bool = False) -> SharedPeer:
    return SharedPeer("acme", peer(name), 0.5, draining, 5_000, num_pulls)


def test_what_brokers_share_replaces_what_this_one_knew(
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


def test_what_is_heard_during_a_read_is_newer_than_it(
    directory: PeerDirectory, clock: FakeClock
) -> None:
    began_s = clock()
    clock.now_s += 1
    announce(directory, peer("a", incarnation=2))
    directory.replace([shared("a")], began_s)
    assert directory.get(ACME, "a").incarnation == 2
    directory.replace([], began_s)
    assert directory.get(ACME, "a").incarnation == 2
