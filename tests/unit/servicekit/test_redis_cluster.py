"""Which server of a Redis Cluster has which slot, as its servers report it;
`tests/contract/lookup_index/test_redis_cluster.py` has real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from lmcache_servicekit.redis_client import CLIENT_ERRORS, RedisCommand
from lmcache_servicekit.redis_cluster import (
    MAX_REDIRECTIONS,
    MAX_SERVERS_ASKED,
    NUM_SLOTS,
    ClusterMap,
    SlotsUnknownError,
    slot_of,
)
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import MovedError, ResponseError

from tests.fixtures.fake_cluster import HIGH, LOW, FakeCluster

LAST = NUM_SLOTS - 1


class Server:
    """Answers `CLUSTER SLOTS`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.is_idle = True
        self.is_closed = False
        self.num_asked = 0

    async def exchange(self, commands: Sequence[RedisCommand]) -> list[Any]:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, LostConnectionError):
            raise self.answer
        return [self.answer]

    async def close(self) -> None:
        self.is_closed = True


def slots(*parts: tuple[int, int, bytes, int]) -> list[Any]:
    """As Redis 7 answers: with an id and more after each address, and replicas after the
    master.
    """
    return [
        [first, last, [host, port, b"id", [b"hostname", b"h"]], [b"replica", 9, b"id", []]]
        for first, last, host, port in parts
    ]


class World:
    """Servers by address; unknown ones refuse connections."""

    def __init__(self, **answers: Any) -> None:
        self.servers = {(host, 1): Server(answer) for host, answer in answers.items()}

    def make(self, address: tuple[str, int]) -> Any:
        return self.servers.setdefault(address, Server(LostConnectionError("refused")))

    def map_of(self, *hosts: str) -> ClusterMap:
        return ClusterMap([(host, 1) for host in hosts], self.make)


def test_a_key_is_of_the_slot_of_its_tag() -> None:
    """The second value is the one of Redis' own specification."""
    assert slot_of("lmc2:{i}:leases") == slot_of("x{i}y") == 15_759
    assert slot_of("{123456789}") == 0x31C3


@pytest.mark.parametrize("name", [b"", b"?", None])
async def test_slots_without_a_name_are_those_of_the_asked_server(name: bytes | None) -> None:
    world = World(a=slots((0, LAST, name, 1)))
    known = world.map_of("a")
    await known.refresh()
    assert known.node_of(7) is world.servers["a", 1]


async def test_server_that_knows_all_slots_is_believed_first() -> None:
    world = World(
        a=slots((0, 5, b"a", 1)),
        b=slots((0, LAST, b"b", 1)),
        c=LostConnectionError("away"),
        d=ResponseError("no cluster"),
        e=None,
    )
    known = world.map_of("a", "b", "c", "d", "e")
    async with asyncio.timeout(60):
        await known.refresh()
    assert known.masters() == [world.servers["b", 1]]


async def test_partial_map_is_used() -> None:
    world = World(a=slots((0, 5, b"a", 1)), b=LostConnectionError("away"))
    known = world.map_of("a", "b")
    await known.refresh()
    assert known.node_of(5) is world.servers["a", 1]
    assert not known.is_stale
    with pytest.raises(SlotsUnknownError):
        known.node_of(6)
    assert known.is_stale
    assert issubclass(SlotsUnknownError, CLIENT_ERRORS)


async def test_number_of_servers_asked_is_bounded() -> None:
    world = World(
        **{f"s{number}": LostConnectionError("away") for number in range(3 * MAX_SERVERS_ASKED)}
    )
    known = world.map_of(*(f"s{number}" for number in range(3 * MAX_SERVERS_ASKED)))
    with pytest.raises(SlotsUnknownError):
        await known.refresh()
    assert sum(server.num_asked for server in world.servers.values()) == MAX_SERVERS_ASKED


async def test_server_without_slots_is_closed_once_idle() -> None:
    world = World(a=slots((0, LAST, b"b", 1)))
    known = world.map_of("a")
    await known.refresh()
    former = world.make(("b", 1))
    known.node_of(0)
    former.is_idle = False
    world.servers["a", 1].answer = former.answer = slots((0, LAST, b"c", 1))
    for is_idle in (False, True):
        former.is_idle = is_idle
        known.is_stale = True
        await known.refresh()
        assert former.is_closed is is_idle
    assert not world.servers["a", 1].is_closed
    await known.close()
    assert world.servers["a", 1].is_closed


@pytest.mark.parametrize("is_low_refused", [True, False])
async def test_lost_answer_is_raised_before_a_refusal(is_low_refused: bool) -> None:
    lost, refused = LostConnectionError("gone"), ResponseError("OOM")
    world = FakeCluster(*((refused, lost) if is_low_refused else (lost, refused)))
    with pytest.raises(LostConnectionError):
        await world.client.many([LOW, HIGH])
    assert world.map.is_stale


async def test_a_refusal_is_raised_when_all_have_answered() -> None:
    world = FakeCluster(ResponseError("OOM"), b"high")
    with pytest.raises(ResponseError, match="OOM"):
        await world.client.many([LOW, HIGH])
    assert world.b.asked == [HIGH.words]


async def test_redirections_are_bounded() -> None:
    world = FakeCluster(MovedError("1 b:1"), b"high")
    with pytest.raises(MovedError):
        await world.client.many([LOW])
    assert len(world.a.asked) == MAX_REDIRECTIONS
