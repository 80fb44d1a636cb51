"""Requests that follow one another on one Redis connection, against a scripted server in virtual
time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.remote import redis as redis_tier
from lmcache_core.storage.remote.redis import RedisBackend, SteadySentinels, encoded, exchange
from redis.exceptions import ConnectionError as LostConnectionError

from tests.fixtures.redis_server import ScriptedRedis
from tests.fixtures.waiting import until
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

pytestmark = pytest.mark.virtual_time


async def test_request_is_one_round_trip_whatever_its_number_of_chunks():
    arena = Arena()
    async with ScriptedRedis([make_record(i) for i in range(8)], delay_s=0.05) as server:
        backend = RedisBackend(server.client, 5.0)
        results = await backend.batched_get([make_key(i) for i in range(8)], arena)
        assert server.history == ["request"] * 8 + ["answer"] * 8
    for i, result in enumerate(results):
        assert isinstance(result, Chunk)
        assert bytes(result.memory.byte_array) == make_payload(i)
        result.release()
    async with ScriptedRedis([ScriptedRedis.OK] * 8, delay_s=0.05) as server:
        backend = RedisBackend(server.client, 5.0)
        assert await backend.batched_put([make_chunk(i) for i in range(8)]) == [True] * 8
        assert server.history == ["request"] * 8 + ["answer"] * 8


async def test_bytes_requested_ahead_are_bounded_by_the_size_of_the_last_record(monkeypatch):
    record = make_record("large", make_payload("large", 100_000))
    monkeypatch.setattr(redis_tier, "AHEAD_BYTES", 3 * len(record))
    async with ScriptedRedis([record] * 12, delay_s=0.02) as server:
        backend = RedisBackend(server.client, 5.0)
        for turn in range(2):
            for result in await backend.batched_get([make_key("large")] * 6, Arena()):
                assert isinstance(result, Chunk), turn
            first = ["request"] * (3 if turn else 1) + ["answer"]
            assert server.history[: len(first)] == first, "the size is not known at first"
            ahead = [
                server.history[:i].count("request") - server.history[:i].count("answer")
                for i in range(len(server.history) + 1)
            ]
            assert max(ahead) == 3
            server.history.clear()


async def test_connection_lost_before_any_answer_is_replaced_once():
    ok, lost = ScriptedRedis.OK, ScriptedRedis.LOST
    chunks = [make_chunk(i) for i in range(2)]
    async with ScriptedRedis([lost, ok, ok]) as server:
        assert await RedisBackend(server.client, 5.0).batched_put(chunks) == [True, True]
    for answers in ([ok, lost, ok, ok], [lost, lost, ok]):
        async with ScriptedRedis(answers) as server:
            with pytest.raises(UnavailableError):
                await RedisBackend(server.client, 5.0).batched_put(chunks)


@pytest.mark.parametrize("error", ["-LOADING Redis is loading", "-NOAUTH Authentication required."])
async def test_server_that_refuses_everything_is_unavailable(error: str):
    async with ScriptedRedis([error] * 2) as server:
        backend = RedisBackend(server.client, 5.0)
        with pytest.raises(UnavailableError, match=error[1:]):
            await backend.batched_put([make_chunk(1)])
        with pytest.raises(UnavailableError, match=error[1:]):
            await backend.batched_get([make_key(1)], Arena())


@pytest.mark.parametrize("answer", ["+OK", ":1", "$x", "$5\r\n1234567", "x" * 70_000, "-ERR no"])
async def test_invalid_answer_to_a_get_makes_redis_unavailable_and_leaks_nothing(answer: str):
    arena = Arena()
    async with ScriptedRedis([make_record(0), answer, answer]) as server:
        with pytest.raises(UnavailableError):
            await RedisBackend(server.client, 5.0).batched_get([make_key(0), make_key(1)], arena)
    arena.check_empty()


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("timeout_s", [60.0, 0.5], ids=["longer", "as long as the caller's"])
async def test_results_that_came_in_time_are_kept_and_the_connection_is_not_used_again(timeout_s):
    arena = Arena()
    async with ScriptedRedis([make_record(0), None, never]) as server:
        results = await RedisBackend(server.client, timeout_s).batched_get(
            [make_key(i) for i in range(4)], arena, timeout_s=0.5
        )
        assert isinstance(results[0], Chunk)
        results[0].release()
        assert results[2:] == [Miss(MissReason.DEADLINE)] * 2
        await until(lambda: server.history[-1] == "closed")
    arena.check_empty()


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


async def test_sentinels_are_all_kept_and_the_one_that_answers_is_asked_first() -> None:
    every = [Sentinel("a", False), Sentinel("b", True), Sentinel("c", True)]
    sentinels = SteadySentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = list(every)
    found = await asyncio.gather(*(sentinels.discover_master("mymaster") for _ in range(3)))
    assert found == [("10.0.0.1", 6379)] * 3
    assert {one.name for one in sentinels.sentinels} == {"a", "b", "c"}
    assert sentinels.sentinels[0].name == "b"


async def test_value_that_stops_in_the_middle_releases_its_memory():
    record = make_record(0, make_payload(0, 100_000))
    begun = b"$%d\r\n%s" % (len(record), record[:50_000])
    arena = Arena(1 << 20)
    async with ScriptedRedis([begun.decode("latin-1"), never]) as server:
        results = await RedisBackend(server.client, 60.0).batched_get(
            [make_key(0)], arena, timeout_s=0.5
        )
    assert results == [Miss(MissReason.DEADLINE)]
    arena.check_empty()


async def test_second_cancellation_does_not_leak_the_connection():
    async def read(i: int, replies: redis_tier.Replies) -> object:
        return await replies.read()

    async with ScriptedRedis(["+a", never]) as server:
        asking = asyncio.ensure_future(
            exchange(
                server.client, [encoded("GET", "k")] * 2, lambda: 2, read, lambda i, answer: never()
            )
        )
        await until(lambda: "answer" in server.history)
        asking.cancel()
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_client_library_can_use_the_connection_after_an_exchange():
    """Its own commands work, and it learns that the connection has ended."""
    async with ScriptedRedis([make_record(1), ScriptedRedis.LOST, b"value"]) as server:
        backend = RedisBackend(server.client, 5.0)
        [result] = await backend.batched_get([make_key(1)], Arena())
        assert isinstance(result, Chunk)
        assert await server.client.unlink("k") == 0
        assert "closed" not in server.history
        with pytest.raises(LostConnectionError):
            await server.client.get("k")
        assert await server.client.get("k") == b"value"
