"""Requests that follow one another on one Redis connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.remote import redis as redis_tier
from lmcache_core.storage.remote.redis import (
    SLICE_BYTES,
    RedisBackend,
    SteadySentinels,
    encoded,
    exchange,
)
from redis.connection import Encoder, PythonRespSerializer
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import ResponseError

from tests.fixtures.redis_server import FakeRedis
from tests.suites.backend_suite import Arena
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record


def test_a_command_is_encoded_as_the_client_library_does_it():
    value = bytes(range(256)) * 20
    pack = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode).pack
    for words in (("GET", "lmc:é:1"), ("SET", "k", value, "EX", 60), ("SET", "k", b"")):
        assert b"".join(encoded(*words)) == b"".join(pack(*words))
    assert b"".join(encoded("SET", "k", (value[:7], memoryview(value)[7:]))) == b"".join(
        pack("SET", "k", value)
    )


async def test_a_request_is_one_round_trip_however_many_chunks():
    client = FakeRedis([make_record(i) for i in range(20)])
    arena = Arena()
    results = await RedisBackend(client, 1.0).batched_get([make_key(i) for i in range(8)], arena)
    assert client.history == ["send"] * 8 + ["read"] * 8
    for i, result in enumerate(results):
        assert isinstance(result, Chunk)
        assert bytes(result.memory.byte_array) == make_payload(i)
        result.release()
    client = FakeRedis([b"OK"] * 8)
    assert (
        await RedisBackend(client, 1.0).batched_put([make_chunk(i) for i in range(8)]) == [True] * 8
    )
    assert client.history == ["send"] * 8 + ["read"] * 8


async def test_no_more_is_asked_for_ahead_than_the_bound_by_the_size_of_the_last_record(
    monkeypatch,
):
    record = make_record("large", make_payload("large", 100_000))
    monkeypatch.setattr(redis_tier, "AHEAD_BYTES", 3 * len(record))
    client = FakeRedis([record] * 20)
    backend = RedisBackend(client, 1.0)
    for turn in range(2):
        for result in await backend.batched_get([make_key("large")] * 6, Arena()):
            assert isinstance(result, Chunk), turn
        first = ["send"] * (3 if turn else 1) + ["read"]
        assert client.history[: len(first)] == first, "the size is not known at first"
        ahead = [
            client.history[:i].count("send") - client.history[:i].count("read")
            for i in range(len(client.history) + 1)
        ]
        assert max(ahead) == 3
        client.history.clear()


async def test_a_large_value_is_sent_in_slices_and_arrives_whole():
    client = FakeRedis([b"OK"])
    payload = make_payload("a", 2 * SLICE_BYTES + 5)
    chunk = make_chunk("a", payload=payload)
    assert await RedisBackend(client, 1.0).batched_put([chunk]) == [True]
    assert client.history.count("send") == 5
    assert client.sent.endswith(chunk.head + payload + b"\r\n")


async def test_a_connection_that_was_lost_before_any_answer_is_replaced_once():
    client = FakeRedis([LostConnectionError("reset"), b"OK", b"OK"])
    assert await RedisBackend(client, 1.0).batched_put([make_chunk(i) for i in range(2)]) == [
        True,
        True,
    ]
    client.check_released()
    client = FakeRedis([b"OK", LostConnectionError("reset"), b"OK", b"OK"])
    with pytest.raises(UnavailableError):
        await RedisBackend(client, 1.0).batched_put([make_chunk(i) for i in range(2)])
    client.check_released()
    assert client.history[-1] == "disconnect"


async def test_an_error_in_the_middle_of_a_get_gives_back_what_came_before():
    arena = Arena()
    client = FakeRedis([make_record(0), ResponseError("LOADING"), make_record(2)])
    with pytest.raises(UnavailableError, match="LOADING"):
        await RedisBackend(client, 1.0).batched_get([make_key(i) for i in range(3)], arena)
    assert arena.allocator.used_bytes == 0
    client.check_released()


async def test_an_empty_value_is_a_miss_and_spoils_no_later_call():
    class Client(FakeRedis):
        async def unlink(self, *names: str) -> int:
            return len(names)

    arena = Arena()
    backend = RedisBackend(Client([b"", b"", make_record(1)]), 1.0)  # what is damaged is read twice
    assert await backend.batched_get([make_key(0)], arena) == [Miss(MissReason.CORRUPT)]
    [result] = await backend.batched_get([make_key(1)], arena)
    assert isinstance(result, Chunk)
    result.release()


async def test_what_came_in_time_is_kept_and_the_connection_is_not_used_again():
    async def never() -> None:
        await asyncio.sleep(10)

    arena = Arena()
    client = FakeRedis([make_record(0), None, never])
    results = await RedisBackend(client, 60.0).batched_get(
        [make_key(i) for i in range(4)], arena, timeout_s=0.5
    )
    assert isinstance(results[0], Chunk)
    results[0].release()
    assert results[2:] == [Miss(MissReason.DEADLINE)] * 2
    assert client.history[-1] == "disconnect"
    client.check_released()
    assert arena.allocator.used_bytes == 0


async def test_answers_are_dealt_with_one_at_a_time_beside_reading_the_next():
    running, most, done = 0, 0, []

    async def deal(i: int, answer: object) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        done.append((i, answer))
        running -= 1

    client = FakeRedis([b"a", b"b", b"c"])
    await exchange(client, [encoded("GET", "k")] * 3, lambda: 0, deal)
    assert done == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert most == 1
    assert client.history == ["send", "read"] * 3, "one at a time when none may be ahead"
    client.check_released()


async def test_what_came_in_time_is_kept_also_when_the_tiers_own_deadline_is_the_callers():
    async def never() -> None:
        await asyncio.sleep(10)

    arena = Arena()
    client = FakeRedis([make_record(0), never])
    results = await RedisBackend(client, 0.5).batched_get(
        [make_key(0), make_key(1)], arena, timeout_s=0.5
    )
    assert isinstance(results[0], Chunk)
    results[0].release()
    assert results[1] == Miss(MissReason.DEADLINE)
    client.check_released()
    assert arena.allocator.used_bytes == 0


async def test_a_second_cancellation_while_an_answer_is_given_up_does_not_cost_the_connection():
    async def never() -> None:
        await asyncio.sleep(10)

    client = FakeRedis([b"a", never])
    asking = asyncio.ensure_future(
        exchange(client, [encoded("GET", "k")] * 2, lambda: 2, lambda i, answer: never())
    )
    while client.history.count("read") < 2:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert client.history[-1] == "disconnect"
    client.check_released()


MASTER = {
    "ip": "10.0.0.1",
    "port": 6379,
    "is_master": True,
    "is_sdown": False,
    "is_odown": False,
    "num-other-sentinels": 2,
}


class Sentinel:
    def __init__(self, name: str, answers: bool) -> None:
        self.name = name
        self._answers = answers

    async def sentinel_masters(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if not self._answers:
            raise LostConnectionError(self.name)
        return {"mymaster": MASTER}


async def test_none_gets_lost_and_the_one_that_answers_is_asked_first() -> None:
    every = [Sentinel("a", False), Sentinel("b", True), Sentinel("c", True)]
    sentinels = SteadySentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = list(every)
    found = await asyncio.gather(*(sentinels.discover_master("mymaster") for _ in range(3)))
    assert found == [("10.0.0.1", 6379)] * 3
    assert {one.name for one in sentinels.sentinels} == {"a", "b", "c"}
    assert sentinels.sentinels[0].name == "b"
