"""What brokers share, on a real Redis and on a real Redis Cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lmcache_broker.peers import redis_peers
from lmcache_broker.peers.record import PlacedOrder, SharedPeer
from lmcache_broker.peers.redis_peers import RedisPeers
from lmcache_broker.peers.redis_scripts import KEYS
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import CopyOrder, DrainReport, Peer, PeerFigures, TierFigures
from lmcache_servicekit.errors import ConflictError
from lmcache_servicekit.redis_client import Argument, RedisAccess, RedisCommand
from lmcache_servicekit.redis_cluster import create_redis_client

from tests.fixtures.redis_cluster import running_cluster
from tests.fixtures.redis_sentinel import watched_redis
from tests.fixtures.redis_server import running_redis
from tests.fixtures.waiting import until

TTL_MS = 10_000
REPORT = DrainReport("handing_over", 5, 1, 2, 0, 2)


@pytest.fixture(scope="module", params=["one server", "cluster"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cluster":
        with running_cluster() as cluster:
            yield cluster.url
    else:
        with running_redis() as server:
            yield server.url


class Peers(RedisPeers):
    """What a broker shares, with its client in the test's hands."""

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.client = create_redis_client(RedisAccess.parse(url), timeout_s)
        super().__init__(self.client, timeout_s)


async def raw(broker: Peers, *words: Argument) -> Any:
    """Return the answer of the server that has the brokers' keys."""
    return (await broker.client.many([RedisCommand(KEYS[0], words)]))[0]


@pytest.fixture
async def pair(url: str) -> AsyncIterator[tuple[Peers, Peers]]:
    """Two brokers, and nothing in Redis."""
    brokers = Peers(url), Peers(url)
    await raw(brokers[0], "FLUSHALL")
    yield brokers
    for broker in brokers:
        await broker.close()


def shared(
    name: str = "a",
    incarnation: int = 1,
    *,
    draining: bool = False,
    ttl_ms: int = TTL_MS,
    drain: DrainReport | None = None,
) -> SharedPeer:
    return SharedPeer(
        "acme",
        Peer(name, incarnation, f"lm://{name}:1", "sidecar", "z", "n"),
        0.25,
        draining,
        ttl_ms,
        drain=drain,
    )


async def names(broker: RedisPeers) -> list[str]:
    return [peer.peer.id for peer in await broker.read()]


async def test_brokers_read_what_one_has_announced(pair: tuple[Peers, Peers]) -> None:
    one, two = pair
    assert not await one.announce(shared(drain=REPORT))
    assert await one.announce(shared("b", draining=True))
    found, other = sorted(await two.read(), key=lambda peer: peer.peer.id)
    assert (found.owner, found.peer, found.load, found.drain) == (
        "acme",
        shared().peer,
        0.25,
        REPORT,
    )
    assert TTL_MS - 5_000 < found.ttl_ms <= TTL_MS
    assert (other.peer.id, other.draining) == ("b", True)
    assert await one.announce(shared("b")), "a drain lasts for the incarnation"
    await one.remove("acme", "b")
    assert await names(two) == ["a"]


async def test_figures_are_shared_and_those_of_other_versions_are_read(
    pair: tuple[Peers, Peers], url: str
) -> None:
    one, two = pair
    figures = PeerFigures(
        3,
        {"memory": 2},
        {"memory": 20},
        {"never_stored": 1},
        4,
        40,
        {"b": 9},
        (TierFigures("memory", 4, 40, 80),),
        7,
    )
    await one.announce(replace(shared(), figures=figures))
    (found,) = await two.read()
    assert found.figures == figures
    written = await raw(one, "HGET", KEYS[0], "acme/a")
    head, fields = written[:36], json.loads(written[36:])
    for others, wanted in (
        (fields[:6], None),
        ([*fields, {"later": 1}], figures),
        ([*fields[:6], {**fields[6], "watts": 3}], figures),
        ([*fields[:6], {"requested_chunks": "many"}], None),
    ):
        await raw(one, "HSET", KEYS[0], "acme/a", head + json.dumps(others).encode())
        fresh = Peers(url)
        (found,) = await fresh.read()
        await fresh.close()
        assert (found.peer, found.figures) == (shared().peer, wanted)


async def test_the_later_incarnation_wins_and_a_lease_is_only_made_longer(
    pair: tuple[Peers, Peers],
) -> None:
    one, two = pair
    big = (1 << 62) + 1
    assert not await one.announce(shared(incarnation=big))
    with pytest.raises(ConflictError, match="peer a: a later incarnation is registered"):
        await two.announce(shared(incarnation=big - 1))
    await two.announce(shared(incarnation=big, ttl_ms=1))
    (found,) = await two.read()
    assert (found.peer.incarnation, found.ttl_ms > 1_000) == (big, True)
    await one.drain("acme", "a")
    assert not await two.announce(shared(incarnation=big + 1)), "a new incarnation does not drain"


async def test_an_expired_lease_blocks_no_other(pair: tuple[Peers, Peers]) -> None:
    one, two = pair
    await one.announce(shared(incarnation=7, draining=True, ttl_ms=1))
    await until(lambda: is_empty(two))
    assert await raw(one, "HLEN", KEYS[0]) == 0
    await one.announce(shared(incarnation=7, draining=True, ttl_ms=1))
    await until(lambda: is_empty(two))
    assert not await two.announce(shared(incarnation=3))


async def is_empty(broker: RedisPeers) -> bool:
    return await names(broker) == []


async def test_pulls_are_counted_for_each_life_and_end(pair: tuple[Peers, Peers]) -> None:
    one, two = pair
    await one.announce(shared(incarnation=12))
    life, other = "acme/a#12", "acme/a#13"
    claims = [(life, f"p{i}") for i in range(3)]
    assert await one.claim("acme/r", claims, 2, TTL_MS) == [(True, 1), (True, 2), (False, 2)]
    assert await two.claim("acme/s", [(life, "q"), (other, "q")], 2, TTL_MS) == [
        (False, 2),
        (True, 1),
    ]
    assert [peer.num_pulls for peer in await two.read()] == [2]
    assert await two.end_pulls("acme/s", ["p0"]) == [False], "it belongs to another requester"
    assert await two.end_pulls("acme/r", ["p0", "p0", "unknown"]) == [True, False, False]
    assert [peer.num_pulls for peer in await one.read()] == [1]
    assert await one.claim("acme/r", [(life, "r")], 2, 20) == [(True, 2)]

    async def has_ended() -> bool:
        return [peer.num_pulls for peer in await two.read()] == [1]

    await until(has_ended)
    assert await raw(one, "HLEN", KEYS[3]) == 2


async def test_a_pull_is_renewed_at_either_broker(
    pair: tuple[Peers, Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await one.announce(shared())
    await one.claim("acme/r", [("acme/a#1", "p")], 1, TTL_MS)
    assert await two.renew_pulls("acme/s", ["p"], TTL_MS) == [None], (
        "it belongs to another requester"
    )
    assert await two.renew_pulls("acme/r", ["p", "unknown"], TTL_MS) == ["acme/a#1", None]
    assert [peer.num_pulls for peer in await one.read()] == [1]
    monkeypatch.setattr(redis_peers, "MAX_PULL_S", 0.0)
    assert await two.renew_pulls("acme/r", ["p"], TTL_MS) == [None], "a pull has a longest time"


async def test_an_order_is_delivered_once(
    pair: tuple[Peers, Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    orders = [CopyOrder("0" * 32, f"p{i}", f"lm://p{i}.example:1") for i in range(3)]
    await one.order_copies([PlacedOrder("acme", "a", order) for order in orders[:2]], TTL_MS)
    await two.order_copies([PlacedOrder("acme", "a", order) for order in orders[1:]], TTL_MS)
    assert await two.take_orders("rival", "a") == await two.take_orders("acme", "b") == []
    assert await two.take_orders("acme", "a") == orders, "each of them once"
    assert await one.take_orders("acme", "a") == []
    monkeypatch.setattr(redis_peers, "MAX_ORDERING_PEERS", 2)
    monkeypatch.setattr(redis_peers, "MAX_ORDER_BYTES_PER_PEER", 100)
    await one.order_copies(
        [PlacedOrder("acme", name, order) for name in "abc" for order in orders], TTL_MS
    )
    assert await one.take_orders("acme", "a") == [], "there were too many"
    assert await one.take_orders("acme", "c") == orders[:2]


async def test_a_redis_that_is_away_costs_one_deadline(tmp_path: Path) -> None:
    away = Peers(f"unix://{tmp_path / 'absent'}", 0.5)
    with pytest.raises(UnavailableError, match=r"redis at /.* cannot be reached"):
        await away.read()
    with pytest.raises(UnavailableError, match="a moment ago"):
        await away.claim("acme/r", [("acme/a#1", "p")], 1, 1)
    await away.close()


async def test_a_redis_that_is_full_is_still_read() -> None:
    with running_redis() as server, server.client() as raw:
        broker = Peers(server.url)
        await broker.announce(shared())
        raw.config_set("maxmemory", "1")
        with pytest.raises(UnavailableError, match=f"redis at 127.0.0.1:{server.port} is full"):
            await broker.announce(shared("b"))
        assert await names(broker) == ["a"]
        assert not await broker.announce(shared(ttl_ms=2 * TTL_MS)), "leases are renewed"
        await broker.drain("acme", "a")
        assert [peer.draining for peer in await broker.read()] == [True]
        raw.config_set("maxmemory", "0")
        await broker.announce(shared("b"))
        assert sorted(await names(broker)) == ["a", "b"]
        await broker.close()


async def answers(peers: Peers) -> bool:
    try:
        await peers.ping()
    except UnavailableError:
        return False
    return True


async def test_another_master_is_found_after_a_failover() -> None:
    with watched_redis() as watched:
        peers = Peers(watched.url)
        await peers.announce(shared())
        watched.master.kill()
        assert not await answers(peers)
        await asyncio.to_thread(watched.wait_for_failover)
        await until(lambda: answers(peers))
        await peers.announce(shared())
        assert await peers.claim("acme/r", [("acme/a#1", "p")], 1, TTL_MS) == [(True, 1)]
        await peers.close()
