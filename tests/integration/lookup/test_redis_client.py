"""What one Redis server answers stands where it was asked, however it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from lmcache_servicekit.redis_client import RedisAccess, RedisNode, describe_failure
from lmcache_servicekit.redis_client import RedisCommand as Command
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import ResponseError

from tests.fixtures.redis_sentinel import watched_redis
from tests.fixtures.redis_server import running_redis

NUM_LARGE = 300
LARGE_BYTES = 7001


def node_at(url: str) -> RedisNode:
    return RedisNode(*RedisAccess.parse(url).server(timeout_s=60, max_connections=4))


@pytest_asyncio.fixture
async def node() -> AsyncIterator[RedisNode]:
    with running_redis() as server:
        made = node_at(server.url)
        yield made
        await made.close()


async def test_refusals_stand_between_answers(node: RedisNode) -> None:
    words = [
        ("SET", "a", "1"),
        ("HGET", "a", "field"),
        ("GET", "a"),
        ("GET", "b"),
        ("INCR", "a"),
        ("NOSUCH",),
        ("MGET", "a", "b"),
    ]
    answers = await node.exchange([Command("a", one) for one in words])
    assert isinstance(answers[1], ResponseError)
    assert isinstance(answers[5], ResponseError)
    assert [answers[place] for place in (0, 2, 3, 4, 6)] == [b"OK", b"1", None, 2, [b"2", None]]
    assert await node.exchange([Command("a", ("GET", "a"))]) == [b"2"]


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        ("is read-only", ("REPLICAOF", "127.0.0.1", "1")),
        ("is full", ("CONFIG", "SET", "maxmemory", "1")),
        ("refuses a command", ("CONFIG", "SET", "min-replicas-to-write", "1")),
    ],
)
async def test_a_refused_write_does_not_cost_the_answers_sent_with_it(
    node: RedisNode, wanted: str, settings: tuple[str, ...]
) -> None:
    await node.exchange([Command("a", ("SET", "a", "1")), Command("a", settings)])
    words = [("GET", "a"), ("SET", "a", "2"), ("GET", "a"), ("SET", "a", "3")]
    first, refused, second, refused_too = await node.exchange([Command("a", one) for one in words])
    assert (first, second) == (b"1", b"1")
    for answer in (refused, refused_too):
        assert isinstance(answer, ResponseError)
        assert wanted in describe_failure("redis", answer, 1.0)


async def test_a_server_that_sentinels_no_longer_call_master_is_left() -> None:
    """Sentinels are asked again for each new connection, so a read-only server's one is closed."""
    with watched_redis(down_after_ms=10_000) as watched:
        node = node_at(watched.url)
        await node.exchange([Command("a", ("REPLICAOF", "127.0.0.1", "1"))])
        number = await node.exchange([Command("a", ("CLIENT", "ID"))])
        with pytest.raises(LostConnectionError):
            await node.exchange([Command("a", ("GET", "a")), Command("a", ("SET", "a", "1"))])
        assert await node.exchange([Command("a", ("CLIENT", "ID"))]) != number
        await node.close()


async def test_answers_that_come_in_many_pieces_are_whole_and_in_order(node: RedisNode) -> None:
    values = [b"%07d" % number * (LARGE_BYTES // 7) + b"!" for number in range(NUM_LARGE)]
    await node.exchange(
        [Command("k", ("SET", f"k{number}", value)) for number, value in enumerate(values)]
    )
    assert (
        await node.exchange([Command("k", ("GET", f"k{number}")) for number in range(NUM_LARGE)])
        == values
    )
