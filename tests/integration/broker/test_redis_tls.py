"""Brokers reach what they share over TLS, with a password, and behind sentinels that fail over,
whichever kind of Redis it is.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from lmcache_broker.lifespan import create_shared_peers
from lmcache_broker.peers.redis_peers import RedisPeers
from lmcache_broker.peers.shared import PullClaim, PullVerdict, SharedPeer
from lmcache_broker.settings import BrokerSettings
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.p2p import Peer
from pydantic import SecretStr, ValidationError

from tests.fixtures.redis_sentinel import watched_redis
from tests.fixtures.redis_tls import QUOTED, redis_over_tls
from tests.fixtures.tls import Authority, replace, server_tls

PEER = SharedPeer("acme", Peer("a", 1, "lm://a.example:1"), 0.0, False, 60_000)


def peers_of(url: str, **options: Any) -> RedisPeers:
    found = create_shared_peers(
        BrokerSettings(redis_url=SecretStr(url), **({"redis_timeout_ms": 10_000} | options))
    )
    assert found is not None
    return found


async def use(peers: RedisPeers) -> None:
    """More at once than there are connections."""
    try:
        await peers.ping()
        assert await peers.announce([PEER]) == [False]
        claims = [
            peers.claim("acme/r", [PullClaim("acme/a#1", f"p{i}")], 50, 60_000) for i in range(100)
        ]
        granted = [verdict.is_granted for (verdict,) in await asyncio.gather(*claims)]
        assert granted.count(True) == 50
        assert (await peers.changes()).peers[0].num_pulls == 50
        assert all(
            await peers.end_pulls(
                "acme/r", [f"p{i}" for i, is_granted in enumerate(granted) if is_granted]
            )
        )
    finally:
        await peers.close()


async def is_refused(peers: RedisPeers) -> None:
    try:
        with pytest.raises(UnavailableError) as caught:
            await peers.ping()
        assert "sesame" not in str(caught.value)
    finally:
        await peers.close()


@pytest.mark.parametrize("kind", ["server", "sentinel", "cluster"])
async def test_both_sides_show_certificates_and_the_password_is_needed(
    kind: str, tmp_path: Path
) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    mine = authority.sign("broker", "broker.example")
    shown = {"redis_tls_cert_file": mine.cert, "redis_tls_key_file": mine.key}
    async with redis_over_tls(
        kind, server_tls(authority.sign("redis"), clients=authority), tmp_path
    ) as rest:
        await use(peers_of(f"rediss{rest}", redis_tls_ca_file=authority.file, **shown))
        await is_refused(peers_of(f"rediss{rest}", redis_tls_ca_file=stranger.file, **shown))
        await is_refused(peers_of(f"rediss{rest}", redis_tls_ca_file=authority.file))
        await is_refused(peers_of(f"redis{rest}", redis_timeout_ms=500))
        await is_refused(
            peers_of(
                f"rediss{rest}".replace(QUOTED, "wrong-sesame"),
                redis_tls_ca_file=authority.file,
                **shown,
            )
        )


@pytest.mark.parametrize("kind", ["server", "sentinel", "cluster"])
async def test_new_connections_read_replaced_files(kind: str, tmp_path: Path) -> None:
    stranger, later = Authority(tmp_path, "stranger"), Authority(tmp_path, "later")
    trusted = tmp_path / "trusted.pem"
    replace(trusted, stranger.file.read_bytes())
    async with redis_over_tls(kind, server_tls(later.sign("redis")), tmp_path) as rest:
        peers = peers_of(f"rediss{rest}", redis_tls_ca_file=trusted)
        assert not await answers(peers)
        replace(trusted, later.file.read_bytes())
        await until_answered(peers)
        await use(peers)


async def test_another_master_is_found() -> None:
    with watched_redis() as watched:
        peers = peers_of(watched.url, redis_timeout_ms=500)
        await peers.announce([PEER])
        watched.master.kill()
        began = time.monotonic()
        assert not await answers(peers)
        assert time.monotonic() - began < 1.0
        await asyncio.to_thread(watched.wait_for_failover)
        await until_answered(peers)
        await peers.announce([PEER])
        assert await peers.claim("acme/r", [PullClaim("acme/a#1", "p")], 1, 1000) == [
            PullVerdict(True, 1)
        ]
        await peers.close()


async def test_sentinels_answer_who_shows_the_password(tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("tell-me-where")
    with watched_redis(down_after_ms=10_000, login=("broker", "tell-me-where")) as watched:
        login = {"redis_sentinel_username": "broker", "redis_sentinel_password_file": password_file}
        await use(peers_of(watched.url, **login))
        unknown = peers_of(watched.url)
        assert not await answers(unknown)
        await unknown.close()


async def test_files_that_nobody_would_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="redis_url is none of rediss://"):
        BrokerSettings(redis_url=SecretStr("redis://h"), redis_tls_ca_file=tmp_path / "ca.pem")
    with pytest.raises(ValidationError, match="redis_sentinel_password_file is set, but"):
        BrokerSettings(
            redis_url=SecretStr("redis://h"), redis_sentinel_password_file=tmp_path / "password"
        )
    for url in ("rediss://h", "rediss-sentinel://h/s", "rediss-cluster://h"):
        with pytest.raises(ConfigError, match="absent"):
            peers_of(url, redis_tls_ca_file=tmp_path / "absent.pem")


async def answers(peers: RedisPeers) -> bool:
    try:
        await peers.ping()
    except UnavailableError:
        return False
    return True


async def until_answered(peers: RedisPeers) -> None:
    async with asyncio.timeout(60):
        while not await answers(peers):
            await asyncio.sleep(0.1)
