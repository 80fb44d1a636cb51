"""How a replica reads what the masters of a cluster report of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lmcache_lookup.index.redis_writer import (
    MASTERS_FRESH_S,
    ClusterWriter,
    MastersSeen,
    WriteBounds,
)
from lmcache_servicekit.redis_client import RedisCommand
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import ResponseError

from tests.fixtures.broker import FakeClock
from tests.fixtures.fake_cluster import FakeCluster


class Masters:
    """A writer to two servers, and its clock."""

    def __init__(self, a: Any, b: Any) -> None:
        self.clock = FakeClock()
        self.cluster = FakeCluster(a, b)
        self.writer = ClusterWriter(self.cluster.client, WriteBounds(64, 1000), 0.8, self.clock)


def about(role: str, run_id: str, epoch: int) -> Callable[[RedisCommand], Any]:
    """A server that describes itself, and refuses anything else."""
    texts = {
        ("INFO", "server"): f"# Server\r\nrun_id:{run_id}\r\n",
        ("INFO", "replication"): f"role:{role}\r\n",
        ("CLUSTER", "INFO"): f"cluster_state:ok\r\ncluster_current_epoch:{epoch}\r\n",
    }
    return lambda command: (
        texts[command.words].encode() if command.words in texts else ResponseError("OOM")
    )


async def test_masters_are_asked_again_after_a_while() -> None:
    world = Masters(about("master", "bb", 7), about("master", "aa", 8))
    assert await world.writer.masters_seen() == MastersSeen(8, "aa,bb")
    world.cluster.a.answer = about("master", "cc", 9)
    assert await world.writer.masters_seen() == MastersSeen(8, "aa,bb")
    world.clock.now_s += MASTERS_FRESH_S
    assert await world.writer.masters_seen() == MastersSeen(9, "aa,cc")


@pytest.mark.parametrize(
    "second", [about("slave", "aa", 8), LostConnectionError("gone"), ResponseError("NOPERM")]
)
async def test_masters_are_not_seen_when_one_is_none_or_does_not_answer(second: Any) -> None:
    world = Masters(about("master", "bb", 7), second)
    assert await world.writer.masters_seen() == MastersSeen()
    assert world.cluster.map.is_stale


async def test_missing_permission_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = Masters(about("master", "bb", 7), ResponseError("NOPERM this user has no permissions"))
    for _ in range(3):
        world.clock.now_s += MASTERS_FRESH_S
        await world.writer.masters_seen()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NOPERM" in caplog.text
    world.cluster.b.answer = about("master", "aa", 8)
    world.clock.now_s += MASTERS_FRESH_S
    assert await world.writer.masters_seen() == MastersSeen(8, "aa,bb")
