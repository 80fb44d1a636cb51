"""Brokers reach the store that they share over TLS and through sentinels that fail over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lmcache_broker.app import create_shared_peers
from lmcache_broker.peers.record import SharedPeer
from lmcache_broker.peers.redis_peers import RedisPeers
from lmcache_broker.settings import BrokerSettings
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import Peer
from pydantic import SecretStr

from tests.fixtures.redis_sentinel import watched_redis
from tests.fixtures.redis_tls import redis_over_tls
from tests.fixtures.tls import Authority, server_tls
from tests.fixtures.waiting import until

PEER = SharedPeer("acme", Peer("a", 1, "lm://a.example:1"), 0.0, False, 60_000)


def peers_of(url: str, **options: Any) -> RedisPeers:
    found = create_shared_peers(
        BrokerSettings(redis_url=SecretStr(url), **({"redis_timeout_ms": 10_000} | options))
    )
    assert found is not None
    return found


async def use(peers: RedisPeers) -> None:
    """Send more requests at once than there are connections."""
    try:
        await peers.ping()
        assert not await peers.announce(PEER)
        claims = [peers.claim("acme/r", [("acme/a#1", f"p{i}")], 50, 60_000) for i in range(100)]
        granted = [is_granted for ((is_granted, _),) in await asyncio.gather(*claims)]
        assert granted.count(True) == 50
        assert (await peers.read())[0].num_pulls == 50
        assert all(
            await peers.end_pulls(
                "acme/r", [f"p{i}" for i, is_granted in enumerate(granted) if is_granted]
            )
        )
    finally:
        await peers.close()


async def test_peers_are_shared_over_tls_with_a_password(tmp_path: Path) -> None:
    """The lookup index uses the same client; its tests cover the other kinds and refusals."""
    authority = Authority(tmp_path)
    mine = authority.sign("broker", "broker.example")
    context = server_tls(authority.sign("redis"), clients=authority)
    async with redis_over_tls("server", context, tmp_path) as rest:
        await use(
            peers_of(
                f"rediss{rest}",
                redis_tls_ca_file=authority.file,
                redis_tls_cert_file=mine.cert,
                redis_tls_key_file=mine.key,
            )
        )


async def test_another_master_is_found() -> None:
    with watched_redis() as watched:
        peers = peers_of(watched.url, redis_timeout_ms=500)
        await peers.announce(PEER)
        watched.master.kill()
        assert not await answers(peers)
        await asyncio.to_thread(watched.wait_for_failover)
        await until(lambda: answers(peers))
        await peers.announce(PEER)
        assert await peers.claim("acme/r", [("acme/a#1", "p")], 1, 1000) == [(True, 1)]
        await peers.close()


async def answers(peers: RedisPeers) -> bool:
    try:
        await peers.ping()
    except UnavailableError:
        return False
    return True
