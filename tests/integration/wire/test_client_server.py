"""Client and server of lm:// over real sockets."""

from __future__ import annotations

import asyncio
import random

import pytest
from lmcache_core.errors import AuthenticationError, CapacityError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.security import Ticket
from lmcache_core.wire.served import ServerLimits

from tests.fixtures.wire import Arena, MemoryStore, by_token, client_of, keys_of, serving
from tests.suites.chunks import make_chunk, make_key, make_payload

SIZES = (0, 1, 511, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, 2_500_000)


def take(result: Result) -> bytes | MissReason:
    if isinstance(result, Miss):
        return result.reason
    data = bytes(result.memory.byte_array)
    result.release()
    return data


async def test_chunks_of_any_size_go_there_and_back() -> None:
    store, arena = MemoryStore(16 << 20), Arena(16 << 20)
    chunks = [make_chunk(size, payload=make_payload(size, size)) for size in SIZES]
    async with serving(store) as server, client_of(server.port) as client:
        assert await client.put(chunks) == [True] * len(chunks)
        keys = [chunk.key for chunk in chunks]
        assert await client.contains([*keys, make_key("other")]) == [True] * len(keys) + [False]
        results = await client.get([make_key("other"), *keys], arena)
        assert results[0] == Miss(MissReason.NEVER_STORED)
        for chunk, got in zip(chunks, results[1:], strict=True):
            assert isinstance(got, Chunk)
            assert (got.key, got.header, got.head, got.tier) == (
                chunk.key,
                chunk.header,
                chunk.head,
                "storage",
            )
        assert [take(result) for result in results[1:]] == [
            make_payload(size, size) for size in SIZES
        ]
        assert await client.remove([keys[0], make_key("other"), keys[3]]) == 2
        assert (await client.contains(keys)).count(True) == len(keys) - 2
        await client.ping()
    arena.check_empty()


async def test_prefix_only_stops_at_the_first_that_is_missing() -> None:
    store, arena = MemoryStore(), Arena()
    async with (
        serving(store, ServerLimits(get_batch=2)) as server,
        client_of(server.port) as client,
    ):
        await client.put([make_chunk(i) for i in (0, 1, 2, 4, 5, 6)])
        results = await client.get(keys_of(*range(7)), arena, prefix_only=True)
        assert [take(r) for r in results] == [make_payload(i) for i in range(3)] + [
            MissReason.NEVER_STORED
        ] * 4
        results = await client.get(keys_of(*range(7)), arena)
        assert [isinstance(take(r), bytes) for r in results] == [True] * 3 + [False] + [True] * 3
    arena.check_empty()


async def test_the_server_references_few_chunks_at_once_and_the_client_cuts_batches() -> None:
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


async def test_concurrent_requests_get_their_own_answers() -> None:
    store, arena = MemoryStore(32 << 20), Arena(32 << 20)
    rng = random.Random(7)
    payloads = {i: rng.randbytes(rng.choice((10, 5_000, 300_000))) for i in range(24)}

    async def check(client_number: int) -> None:
        names = random.Random(client_number).sample(range(24), 6)
        results = await client.get(keys_of(*names, f"no {client_number}"), arena)
        assert [take(r) for r in results] == [payloads[i] for i in names] + [
            MissReason.NEVER_STORED
        ]
        assert await client.contains(keys_of(names[0], "no")) == [True, False]
        await client.ping()

    async with (
        serving(store, ServerLimits(max_in_flight=8)) as server,
        client_of(server.port) as client,
    ):
        puts = await asyncio.gather(
            *(client.put([make_chunk(i, payload=data)]) for i, data in payloads.items())
        )
        assert puts == [[True]] * 24
        await asyncio.gather(*(check(n) for n in range(50)))
        assert server.num_connections == 1
    arena.check_empty()


async def test_a_slow_request_does_not_hold_up_others() -> None:
    store = MemoryStore()
    store.gate = asyncio.Event()
    async with serving(store) as server, client_of(server.port) as client:
        slow = asyncio.create_task(client.contains(keys_of(1)))
        await asyncio.sleep(0.02)
        await client.ping(timeout_s=30)
        assert not slow.done()
        store.gate.set()
        assert await slow == [False]


async def test_no_memory_on_either_side_is_said_and_the_connection_stays() -> None:
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


async def test_a_put_above_the_rate_gives_its_memory_back_at_once() -> None:
    """Else a client that asks too often holds the server's memory for as long as it stays."""

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


async def test_a_deadline_is_kept_and_gives_everything_back() -> None:
    store, arena = MemoryStore(), Arena()
    async with serving(store) as server, client_of(server.port) as client:
        await client.put([make_chunk(1)])
        store.gate = asyncio.Event()
        began = asyncio.get_running_loop().time()
        assert (
            await client.get(keys_of(1, 2), arena, timeout_s=0.1) == [Miss(MissReason.DEADLINE)] * 2
        )
        with pytest.raises(UnavailableError):
            await client.contains(keys_of(1), timeout_s=0.1)
        with pytest.raises(UnavailableError):
            await client.put([make_chunk(3)], timeout_s=0.1)
        assert asyncio.get_running_loop().time() - began < 20
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


@pytest.mark.parametrize("num_steps", [*range(0, 12, 2), 20, 40, 80])
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


async def test_cancelled_puts_leave_nothing_behind() -> None:
    store, arena = MemoryStore(32 << 20), Arena(32 << 20)
    async with serving(store) as server, client_of(server.port) as client:
        for num_steps in range(0, 30, 3):
            chunks = [
                make_chunk((num_steps, i), payload=make_payload(i, 300_000), allocate=arena)
                for i in range(4)
            ]
            task = asyncio.create_task(client.put(chunks))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            for chunk in chunks:
                chunk.release()
            arena.check_empty()
        assert await client.put([make_chunk("after")]) == [True]


async def test_tenants_are_those_of_their_tokens() -> None:
    store, arena = MemoryStore(), Arena()
    async with (
        serving(store, authenticate=by_token) as server,
        client_of(server.port, "a") as mine,
        client_of(server.port, "b") as yours,
    ):
        await mine.put([make_chunk(1)])
        assert await mine.contains(keys_of(1)) == [True]
        assert await yours.contains(keys_of(1)) == [False]
        assert [take(r) for r in await yours.get(keys_of(1), arena)] == [MissReason.NEVER_STORED]
        assert await yours.remove(keys_of(1)) == 0
        assert list(store.chunks) == [ChunkKey.of("a", make_key(1).key)]
        async with client_of(server.port) as nobody:
            with pytest.raises(AuthenticationError):
                await nobody.ping()


def verify(ticket: str) -> Ticket:
    tenant, _, requester = ticket.partition("/")
    if tenant == "forged":
        raise AuthenticationError("the ticket's code is wrong")
    return Ticket("key", "here", requester, tenant, 0)


async def test_a_ticket_opens_get_and_nothing_else() -> None:
    store, arena = MemoryStore(), Arena()
    async with (
        serving(store, authenticate=by_token, verify_ticket=verify) as server,
        client_of(server.port, "prod") as owner,
    ):
        await owner.put([make_chunk(1)])
        async with client_of(server.port, name="pod-1") as peer:
            assert [take(r) for r in await peer.get(keys_of(1), arena, ticket="prod/pod-1")] == [
                make_payload(1)
            ]
            assert [take(r) for r in await peer.get(keys_of(1), arena, ticket="test/pod-1")] == [
                MissReason.NEVER_STORED
            ]
            for ticket in ("forged/pod-1", "prod/pod-2", None):
                with pytest.raises(AuthenticationError):
                    await peer.get(keys_of(1), arena, ticket=ticket)
            for refused in (
                peer.contains(keys_of(1)),
                peer.put([make_chunk(2)]),
                peer.remove(keys_of(1)),
            ):
                with pytest.raises(AuthenticationError):
                    await refused
            await peer.ping()
            assert server.num_connections == 2
        assert await owner.contains(keys_of(1, 2)) == [True, False]
    arena.check_empty()


async def test_a_client_that_cannot_connect_waits_before_it_tries_again() -> None:
    store = MemoryStore()
    async with serving(store) as server:
        port = server.port
    async with client_of(port, backoff_initial_s=1.0, backoff_cap_s=1.0) as client:
        with pytest.raises(UnavailableError):
            await client.ping()
        with pytest.raises(UnavailableError, match="next try in") as caught:
            await client.ping()
        async with asyncio.timeout(60):
            while "next try" in str(caught.value):
                await asyncio.sleep(0.05)
                with pytest.raises(UnavailableError) as caught:
                    await client.ping()


async def test_a_closing_server_answers_what_is_underway() -> None:
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


async def test_a_closing_server_waits_no_longer_than_it_may() -> None:
    store = MemoryStore()
    store.gate = asyncio.Event()
    async with serving(store) as server, client_of(server.port) as client:
        underway = asyncio.create_task(client.contains(keys_of(1)))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(9):
            await server.close(drain_s=0.1)
        with pytest.raises(UnavailableError):
            await underway


async def test_a_failing_store_fails_the_request_alone() -> None:
    class Failing(MemoryStore):
        async def contains(self, keys: object) -> list[bool]:
            raise UnavailableError("the disk is gone")

    async with serving(Failing()) as server, client_of(server.port) as client:
        with pytest.raises(UnavailableError, match="the disk is gone"):
            await client.contains(keys_of(1))
        await client.ping()
        assert server.num_connections == 1


async def test_a_bug_in_the_store_ends_the_connection_and_not_the_server(
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


async def test_a_caller_that_has_to_leave_does_not_end_the_connecting() -> None:
    """A short deadline says something about the caller, nothing about the server: the attempt
    goes on, and no backoff begins.
    """
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


async def test_a_client_that_is_closed_while_it_connects() -> None:
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
