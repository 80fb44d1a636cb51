"""Client and server of lm:// over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from lmcache_core.errors import CapacityError, UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.wire.served import ServerLimits

from tests.fixtures.wire import Arena, MemoryStore, client_of, keys_of, serving
from tests.suites.chunks import make_chunk, make_key, make_payload

pytestmark = pytest.mark.virtual_time


def take(result: Result) -> bytes | MissReason:
    if isinstance(result, Miss):
        return result.reason
    data = bytes(result.memory.byte_array)
    result.release()
    return data


async def test_large_requests_are_cut_into_batches() -> None:
    store, arena = MemoryStore(), Arena()
    async with (
        serving(store, ServerLimits(get_batch=3, max_batch=16)) as server,
        client_of(server.port) as client,
    ):
        names = range(40)
        assert all(await client.put([make_chunk(i) for i in names]))
        assert await client.contains(keys_of(*names, "no")) == [True] * 40 + [False]
        results = await client.get(keys_of(*names), arena)
        assert [take(r) for r in results] == [make_payload(i) for i in names]
        assert store.max_keys_in_get == 3
        prefix = await client.get(
            keys_of(*range(20), "no", *range(20, 40)), arena, prefix_only=True
        )
        assert [isinstance(take(r), bytes) for r in prefix] == [True] * 20 + [False] * 21
        assert await client.remove(keys_of(*names, "no")) == 40
    arena.check_empty()


async def test_a_slow_request_does_not_delay_others() -> None:
    store = MemoryStore()
    store.gate = asyncio.Event()
    async with serving(store) as server, client_of(server.port) as client:
        slow = asyncio.create_task(client.contains(keys_of(1)))
        await asyncio.sleep(0.02)
        await client.ping(timeout_s=30)
        assert not slow.done()
        store.gate.set()
        assert await slow == [False]


class FullStore(MemoryStore):
    """Has memory for what arrives, and keeps none of it."""

    async def put(self, chunk: Chunk) -> bool:
        return False


async def test_a_chunk_that_is_not_kept_is_not_acknowledged() -> None:
    async with serving(FullStore()) as server, client_of(server.port) as client:
        assert await client.put([make_chunk(1)]) == [False]


async def test_missing_memory_on_either_side_keeps_the_connection() -> None:
    large = make_chunk("large", payload=make_payload("large", 300_000))
    async with serving(MemoryStore(64 << 10)) as server, client_of(server.port) as client:
        assert await client.put([make_chunk(1), large, make_chunk(2)]) == [True, False, True]
        assert await client.contains([make_key(1), large.key, make_key(2)]) == [True, False, True]
    store, arena = MemoryStore(), Arena(64 << 10)
    async with serving(store) as server, client_of(server.port) as client:
        await client.put([make_chunk(1), large, make_chunk(2)])
        results = await client.get([make_key(1), large.key, make_key(2)], arena)
        assert [take(r) for r in results] == [
            make_payload(1),
            MissReason.NO_MEMORY,
            make_payload(2),
        ]
        assert server.num_connections == 1
        assert arena.num_refused == 1
    arena.check_empty()


async def test_a_put_above_the_rate_releases_its_memory_at_once() -> None:

    def admit(tenant: str) -> None:
        raise CapacityError("asks too often")

    store = MemoryStore()
    async with (
        serving(store, ServerLimits(admit=admit)) as server,
        client_of(server.port) as client,
    ):
        with pytest.raises(UnavailableError, match="asks too often"):
            await client.put([make_chunk(1)])
        await store.arena.until_empty()
        assert client.is_connected


async def test_a_deadline_is_kept_and_releases_everything() -> None:
    store, arena = MemoryStore(), Arena()
    async with serving(store) as server, client_of(server.port) as client:
        await client.put([make_chunk(1)])
        store.gate = asyncio.Event()
        began = asyncio.get_running_loop().time()
        late = [Miss(MissReason.DEADLINE)] * 2
        assert await client.get(keys_of(1, 2), arena, timeout_s=0.1) == late
        with pytest.raises(UnavailableError):
            await client.contains(keys_of(1), timeout_s=0.1)
        with pytest.raises(UnavailableError):
            await client.put([make_chunk(3)], timeout_s=0.1)
        assert asyncio.get_running_loop().time() - began < 0.4
        store.gate.set()
        assert [take(r) for r in await client.get(keys_of(1), arena)] == [make_payload(1)]
    await arena.until_empty()


async def test_a_late_answer_is_drained_and_the_connection_lives() -> None:
    store, arena = MemoryStore(), Arena()
    async with serving(store) as server, client_of(server.port) as client:
        await client.put([make_chunk(i) for i in range(5)])
        store.gate = asyncio.Event()
        late = asyncio.create_task(client.get(keys_of(*range(5)), arena, timeout_s=0.3))
        await asyncio.sleep(0.05)
        await client.ping()
        assert await late == [Miss(MissReason.DEADLINE)] * 5
        assert client.is_connected
        store.gate.set()
        assert [take(r) for r in await client.get(keys_of(3), arena)] == [make_payload(3)]
        assert server.num_connections == 1
    arena.check_empty()


@pytest.mark.parametrize("num_steps", [0, 4, 10, 40])
async def test_a_cancelled_get_gives_its_memory_back_and_the_connection_lives(
    num_steps: int,
) -> None:
    store, arena = MemoryStore(16 << 20), Arena(16 << 20)
    async with serving(store) as server, client_of(server.port) as client:
        await client.put([make_chunk(i, payload=make_payload(i, 400_000)) for i in range(4)])
        task = asyncio.create_task(client.get(keys_of(*range(4)), arena))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
            arena.check_empty()
        else:
            for result in task.result():
                take(result)
        assert [take(r) for r in await client.get(keys_of(2), arena)] == [make_payload(2, 400_000)]
        assert server.num_connections == 1
    arena.check_empty()


async def test_a_client_that_cannot_connect_backs_off() -> None:
    store = MemoryStore()
    async with serving(store) as server:
        port = server.port
    async with client_of(port, backoff_initial_s=1.0, backoff_cap_s=1.0) as client:
        with pytest.raises(UnavailableError):
            await client.ping()
        with pytest.raises(UnavailableError, match="next try in") as caught:
            await client.ping()
        await asyncio.sleep(1.0)
        with pytest.raises(UnavailableError) as caught:
            await client.ping()
        assert "next try" not in str(caught.value)


async def test_a_closing_server_answers_requests_underway() -> None:
    store = MemoryStore()
    store.gate = asyncio.Event()
    async with serving(store) as server, client_of(server.port) as client:
        underway = asyncio.create_task(client.contains(keys_of(1)))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(server.close(drain_s=5))
        await asyncio.sleep(0.05)
        assert not closing.done()
        store.gate.set()
        assert await underway == [False]
        await closing
        with pytest.raises(UnavailableError):
            await client.ping()


async def test_a_closing_server_waits_no_longer_than_its_limit() -> None:
    store = MemoryStore()
    store.gate = asyncio.Event()
    async with serving(store) as server, client_of(server.port) as client:
        underway = asyncio.create_task(client.contains(keys_of(1)))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(9):
            await server.close(drain_s=5)
        with pytest.raises(UnavailableError):
            await underway


async def test_a_short_deadline_does_not_end_the_connecting() -> None:
    store, arena = MemoryStore(), Arena()
    relays: list[asyncio.Task[None]] = []
    opens = asyncio.Event()
    async with serving(store) as server:
        assert await store.put(make_chunk(1))

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await opens.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

        slow = await asyncio.start_server(
            lambda *ends: relays.append(asyncio.create_task(relay(*ends))), "127.0.0.1", 0
        )
        port = slow.sockets[0].getsockname()[1]
        async with slow, client_of(port, connect_timeout_s=60.0) as client:
            for _ in range(4):
                assert await client.get([make_key(1)], arena, timeout_s=0.02) == [
                    Miss(MissReason.DEADLINE)
                ]
            opens.set()
            [result] = await client.get([make_key(1)], arena, timeout_s=60.0)
            assert take(result) == make_payload(1)
            assert len(relays) == 1
        async with asyncio.timeout(9):
            await asyncio.gather(*relays)
    arena.check_empty()


async def test_a_client_closed_while_it_connects_ends_its_calls() -> None:
    answers: list[asyncio.Task[None]] = []

    async def hang_up_after_you(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    silent = await asyncio.start_server(
        lambda *ends: answers.append(asyncio.create_task(hang_up_after_you(*ends))), "127.0.0.1", 0
    )
    async with silent, client_of(silent.sockets[0].getsockname()[1]) as client:
        getting = asyncio.create_task(client.get([make_key(1)], Arena(), timeout_s=5.0))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(UnavailableError):
            await getting
        await client.close()
        with pytest.raises(UnavailableError, match="closed"):
            await client.ping()
    async with asyncio.timeout(9):
        await asyncio.gather(*answers)
    assert answers


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_a_bug_in_the_store_ends_its_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Buggy(MemoryStore):
        async def contains(self, keys: object) -> list[bool]:
            raise KeyError("a bug")

    async with serving(Buggy()) as server, client_of(server.port) as client:
        with pytest.raises(UnavailableError):
            await client.contains(keys_of(1))
        await asyncio.sleep(0.02)
        await client.ping()
    assert "KeyError" in caplog.text
