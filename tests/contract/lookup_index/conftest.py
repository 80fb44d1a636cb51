"""Real servers, one set of each kind for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.redis_cluster import RedisClusterServers, running_cluster
from tests.fixtures.redis_sentinel import WatchedRedis, watched_redis
from tests.fixtures.redis_server import RedisServer, running_redis


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    with running_redis() as redis_server:
        yield redis_server


@pytest.fixture(scope="session")
def sentinels() -> Iterator[WatchedRedis]:
    with watched_redis(down_after_ms=10_000) as watched:
        yield watched


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisClusterServers]:
    with running_cluster(node_timeout_ms=10_000) as servers:
        yield servers
