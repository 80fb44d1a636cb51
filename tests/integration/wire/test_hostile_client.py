"""A client that breaks the protocol loses its connection; others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable

import pytest
from lmcache_core.keys import Lane
from lmcache_core.wire import messages
from lmcache_core.wire.frames import FrameHeader, FrameType, build_header
from lmcache_core.wire.messages import build_frame
from lmcache_core.wire.served import ServerLimits

from tests.fixtures.wire import (
    Arena,
    MemoryStore,
    RawConnection,
    client_of,
    connected,
    keys_of,
    serving,
    until,
)
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record, overstated

pytestmark = pytest.mark.virtual_time

QUICK = ServerLimits(
    hello_timeout_s=0.4, idle_timeout_s=0.4, transfer_timeout_s=0.4, min_bytes_per_s=100 << 20
)

LANE = Lane("vllm", "m", 1, 0)
Attack = Callable[[RawConnection], Awaitable[object]]


def says(
    *frames: tuple[int, messages.Message],
    greets: bool = True,
    num_answers: int = 0,
    code: str = "protocol",
) -> Attack:
    """Say these frames, after HELLO if `greets`; after so many answers, the server says why it
    hangs up.
    """

    async def attack(raw: RawConnection) -> None:
        if greets:
            await raw.hello()
        for number, (correlation_id, message) in enumerate(frames):
            await raw.say(correlation_id, message)
            if number < num_answers:
                assert (await raw.read())[1] == messages.Pong()
        header, message, _ = await raw.read()
        assert header.correlation_id == 0
        assert isinstance(message, messages.ErrorMessage)
        assert message.code == code

    return attack


def sends(*data: bytes, greets: bool = True) -> Attack:
    """Send these bytes and nothing more."""

    async def attack(raw: RawConnection) -> None:
        if greets:
            await raw.hello()
        await raw.send(*data)

    return attack


async def half_a_blob(raw: RawConnection) -> None:
    await raw.hello()
    record = make_record("half", make_payload("half", 200_000))
    await raw.send(build_frame(2, messages.Put(), len(record)), record[:100_000])


async def drip(raw: RawConnection) -> None:
    """A slow loris: a byte now and then."""
    await raw.hello()
    record = make_record("drip", make_payload("drip", 200_000))
    await raw.send(build_frame(2, messages.Put(), len(record)))
    for at in range(200):
        await raw.send(record[at : at + 1])
        await asyncio.sleep(0.01)


async def half_a_frame_and_away(raw: RawConnection) -> None:
    await half_a_blob(raw)
    raw.writer.close()


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


def giant(kind: int, num_meta: int, num_blob: int) -> bytes:
    return struct.pack("<4sB3sQIIQ", b"LMF1", kind, bytes(3), 2, num_meta, 0, num_blob)


PING, MINE = messages.Ping(), messages.Context("mine", "")
FIRST_LANE = (0, messages.DeclareLane(0, LANE))
MANY_KEYS = b"\x91\xdc\x10\x00" + b"\xc4\x00" * 4096
ATTACKS: dict[str, Attack] = {
    "garbage": sends(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3, greets=False),
    "no hello": says((1, PING), greets=False),
    "lane out of order": says((0, messages.DeclareLane(1, LANE))),
    "endless lanes": says(
        *(
            (0, messages.DeclareLane(number, Lane("f", "m", 1, number)))
            for number in range(messages.MAX_LANES)
        ),
        (0, messages.DeclareLane(messages.MAX_LANES, LANE)),
    ),
    "lane between context and request": says((2, MINE), FIRST_LANE, (2, PING)),
    "unknown version": says(
        (1, messages.Hello(5, 9, [], None, "new")), greets=False, code="version"
    ),
    "hello twice": says((2, messages.Hello(1, 1, [], None, "again"))),
    "server's frame": says((2, messages.Pong())),
    "old correlation id": says((5, PING), (5, PING), num_answers=1),
    "context of another request": says((2, MINE), (3, PING)),
    "context twice": says((2, MINE), (2, MINE)),
    "damaged header": sends(flipped(build_frame(2, PING), 9)),
    "giant meta": sends(giant(3, 0xFFFFFFFF, 0)),
    "giant blob": sends(giant(8, 1, 1 << 63)),
    "too many keys": sends(
        build_header(FrameHeader(FrameType.CONTAINS, 2, len(MANY_KEYS), 0)), MANY_KEYS
    ),
    "meta that is none": sends(build_header(FrameHeader(FrameType.GET, 2, 8, 0)), b"\xc1" * 8),
    "silence": sends(greets=False),
    "silence after hello": sends(),
    "half a header": sends(build_frame(2, PING)[:20]),
    "half a blob": half_a_blob,
    "drip": drip,
    "half a frame and away": half_a_frame_and_away,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_the_connection_ends_and_others_are_served(attack: Attack) -> None:
    store, arena = MemoryStore(), Arena()
    async with serving(store, QUICK) as server, client_of(server.port) as honest:
        await honest.put([make_chunk(1)])
        before = store.arena.allocator.used_bytes
        async with connected(server.port) as raw:
            with contextlib.suppress(ConnectionError):  # the server may hang up while we still talk
                await attack(raw)
            assert await raw.is_closed()
        [result] = await honest.get(keys_of(1), arena)
        result.release()  # type: ignore[union-attr]
        assert store.arena.allocator.used_bytes == before
    arena.check_empty()


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record[:-1] + bytes([record[-1] ^ 1]),
        lambda record: record + b"\0",
        lambda record: record[:10],
        lambda record: b"",
    ],
)
async def test_a_damaged_put_is_refused_and_the_connection_stays(
    damage: Callable[[bytes], bytes],
) -> None:
    store = MemoryStore()
    async with serving(store) as server, connected(server.port) as raw:
        await raw.hello()
        await raw.say(2, messages.Put(), damage(make_record("a")))
        assert (await raw.read())[1] == messages.PutOk(False, "corrupt")
        assert not store.chunks
        await raw.say(3, messages.Put(), make_record("a"))
        assert (await raw.read())[1] == messages.PutOk(True, "")
        assert len(store.chunks) == 1


async def test_record_that_states_more_than_can_be_decoded_from_it_is_refused() -> None:
    async with serving(MemoryStore()) as server, client_of(server.port) as client:
        assert await client.put([overstated("a"), make_chunk("b")]) == [False, True]
        assert await client.contains([make_key("a"), make_key("b")]) == [False, True]


async def test_a_put_is_answered_only_when_it_is_whole() -> None:
    store = MemoryStore()
    record = make_record("a", make_payload("a", 50_000))
    async with serving(store) as server, connected(server.port) as raw:
        await raw.hello()
        await raw.send(build_frame(2, messages.Put(), len(record)), record[:-1])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await raw.read()
        assert not store.chunks
        await raw.send(record[-1:])
        assert (await raw.read())[1] == messages.PutOk(True, "")


async def test_malformed_names_fail_their_request_alone() -> None:
    async with serving(MemoryStore()) as server, connected(server.port) as raw:
        await raw.hello()
        await raw.say(0, messages.DeclareLane(0, make_key(1).key.lane()))
        for correlation_id, message in enumerate(
            (
                messages.Contains([(None, b"x")]),
                messages.Get([(None, b"")], False, None),
                messages.Remove([(None, b"LMK1")]),
                messages.Contains([(0, bytes(31))]),
                messages.Contains([(1, bytes(32))]),
                messages.Contains([(0, bytes(32 * 128)), (0, bytes(32))]),
            ),
            2,
        ):
            await raw.say(correlation_id, message)
            header, answer, _ = await raw.read()
            assert header.correlation_id == correlation_id
            assert isinstance(answer, messages.ErrorMessage)
            assert answer.code == "bad_request"
        await raw.say(9, messages.Ping())
        assert (await raw.read())[1] == messages.Pong()


async def test_a_client_that_does_not_read_is_disconnected_and_its_chunks_released() -> None:
    store = MemoryStore(32 << 20)
    async with serving(store, QUICK) as server, client_of(server.port) as honest:
        await honest.put([make_chunk(1, payload=make_payload(1, 8 << 20))])
        async with connected(server.port) as raw:
            await raw.hello()
            raw.writer.transport.pause_reading()
            for correlation_id in range(2, 10):
                await raw.say(
                    correlation_id, messages.Get([(None, make_key(1).key.canonical())], False, None)
                )
            chunk = next(iter(store.chunks.values()))
            await until(lambda: chunk.memory.get_ref_count() <= 1)
            raw.writer.transport.resume_reading()
            assert await raw.is_closed()
        await honest.ping()


async def test_a_flood_of_requests_is_held_back() -> None:
    store = MemoryStore()
    store.gate = asyncio.Event()
    async with (
        serving(store, ServerLimits(max_in_flight=4)) as server,
        connected(server.port) as raw,
    ):
        await raw.hello()
        request = messages.Contains([(None, make_key(i).key.canonical()) for i in range(100)])
        running = 0

        async def count(keys: object) -> list[bool]:
            nonlocal running
            running += 1
            assert store.gate is not None
            await store.gate.wait()
            running -= 1
            return [False] * 100

        store.contains = count  # type: ignore[method-assign]
        flood = asyncio.create_task(raw.send(*(build_frame(i, request) for i in range(2, 400))))
        await asyncio.sleep(0.1)
        assert running == 4
        store.gate.set()
        for _ in range(2, 400):
            assert isinstance((await raw.read())[1], messages.ContainsOk)
        await flood


async def test_a_put_larger_than_the_limit_ends_the_connection() -> None:
    async with (
        serving(MemoryStore(), ServerLimits(max_blob_bytes=10_000)) as server,
        connected(server.port) as raw,
    ):
        await raw.hello()
        await raw.send(build_frame(2, messages.Put(), 10_001))
        assert await raw.is_closed()
