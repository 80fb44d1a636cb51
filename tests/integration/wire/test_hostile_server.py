"""A server that lies costs a client misses, in time: never a wrong chunk or lost memory."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest
from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError, VersionError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.wire import messages
from lmcache_core.wire.messages import build_frame

from tests.fixtures.wire import Arena, RawConnection, client_of, hostile_server, keys_of
from tests.suites.chunks import make_chunk, make_payload, make_record

pytestmark = pytest.mark.virtual_time

TIMEOUT_S = 0.4
"""For lies that only the deadline ends."""
PATIENCE_S = 30.0
"""For all others: only a client that hangs takes so long."""
RECORD = make_record("a", make_payload("a", 20_000))

Lie = Callable[[RawConnection, int], Awaitable[object]]


async def answer_hello(raw: RawConnection) -> None:
    header, _, _ = await raw.read()
    await raw.say(header.correlation_id, messages.HelloOk(1, "liar", 128))


async def forever(raw: RawConnection) -> None:
    await raw.reader.read()


def record_with(payload: bytes) -> bytes:
    """The head of the record of "a" in front of another payload of the same length."""
    return RECORD[: -len(payload)] + payload


def chunk(record: bytes, *, index: int = 0, other: int = 0) -> Lie:
    """Answer by that record, and end the answer."""

    async def lie(raw: RawConnection, request: int) -> None:
        await raw.say(request + other, messages.ChunkHead(index), record)
        await raw.say(request, messages.GetEnd([]))

    return lie


def answer(message: messages.Message) -> Lie:
    async def lie(raw: RawConnection, request: int) -> None:
        await raw.say(request, message)

    return lie


def part(num_bytes: int, stays: bool = True, blob_bytes: int = len(RECORD)) -> Lie:
    """Send so many bytes of the frame of a CHUNK, then nothing, or hang up."""

    async def lie(raw: RawConnection, request: int) -> None:
        await raw.send(
            (build_frame(request, messages.ChunkHead(0), blob_bytes) + RECORD)[:num_bytes]
        )
        if stays:
            await forever(raw)

    return lie


async def blob_out_of_bounds(raw: RawConnection, request: int) -> None:
    await raw.send(struct.pack("<4sB3sQIIQ", b"LMF1", 6, bytes(3), request, 2, 0, 1 << 63))
    await forever(raw)


async def drip(raw: RawConnection, request: int) -> None:
    await raw.send(build_frame(request, messages.ChunkHead(0), len(RECORD)))
    for at in range(len(RECORD)):
        await raw.send(RECORD[at : at + 1])
        await asyncio.sleep(0.01)


def endless(*parts: Callable[[int], bytes]) -> Lie:
    async def lie(raw: RawConnection, request: int) -> None:
        while True:
            await raw.send(*(make(request) for make in parts))
            await asyncio.sleep(0)

    return lie


async def hang_up(raw: RawConnection, request: int) -> None:
    """Says nothing and ends."""


def giant_payload_length() -> bytes:
    record = bytearray(RECORD)
    struct.pack_into("<Q", record, 16, 1 << 62)
    return bytes(record)


OTHER = make_record("b")
LIES: dict[str, tuple[Lie, set[MissReason]]] = {
    "wrong key": (chunk(OTHER), {MissReason.IDENTITY}),
    "wrong digest": (chunk(record_with(bytes(20_000))), {MissReason.CORRUPT}),
    "surplus bytes": (chunk(RECORD + b"\0"), {MissReason.CORRUPT}),
    "giant payload length": (chunk(giant_payload_length()), {MissReason.CORRUPT}),
    "giant blob": (part(32 + 2 + 24, blob_bytes=4 << 30), {MissReason.DEADLINE}),
    "blob out of bounds": (blob_out_of_bounds, {MissReason.UNAVAILABLE}),
    "short body": (part(15_000), {MissReason.DEADLINE}),
    "short body and end": (part(15_000, stays=False), {MissReason.UNAVAILABLE}),
    "drip": (drip, {MissReason.DEADLINE}),
    "endless chunks": (
        endless(lambda request: build_frame(request, messages.ChunkHead(0), len(OTHER)) + OTHER),
        {MissReason.IDENTITY, MissReason.UNAVAILABLE},
    ),
    "endless garbage": (endless(lambda _: b"LMF1" + bytes(4092)), {MissReason.UNAVAILABLE}),
    "endless answers": (
        endless(lambda request: build_frame(request, messages.Pong())),
        {MissReason.UNAVAILABLE},
    ),
    "index out of range": (chunk(RECORD, index=100), {MissReason.UNAVAILABLE}),
    "chunk of no request": (chunk(RECORD, other=77), {MissReason.UNAVAILABLE}),
    "miss out of range": (
        answer(messages.GetEnd([(0, "never_stored"), (99, "never_stored")])),
        {MissReason.NEVER_STORED, MissReason.UNAVAILABLE},
    ),
    "another answer": (answer(messages.ContainsOk([True])), {MissReason.UNAVAILABLE}),
    "silence": (part(0), {MissReason.DEADLINE}),
    "hang up": (hang_up, {MissReason.UNAVAILABLE}),
}


@pytest.mark.parametrize(("lie", "reasons"), LIES.values(), ids=LIES)
async def test_a_lie_is_a_miss_in_time(lie: Lie, reasons: set[MissReason]) -> None:
    arena = Arena()

    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        header, _, _ = await raw.read()
        await lie(raw, header.correlation_id)

    timeout_s = TIMEOUT_S if MissReason.DEADLINE in reasons else PATIENCE_S
    async with (
        hostile_server(behave) as port,
        client_of(port, connect_timeout_s=PATIENCE_S) as client,
    ):
        async with asyncio.timeout(timeout_s + PATIENCE_S):
            [result] = await client.get(keys_of("a"), arena, timeout_s=timeout_s)
        assert isinstance(result, Miss)
        assert result.reason in reasons
        arena.check_empty()


async def test_a_half_read_frame_of_an_expired_call_closes_the_connection() -> None:
    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        header, _, _ = await raw.read()
        await part(15_000)(raw, header.correlation_id)

    async with hostile_server(behave) as port, client_of(port) as client:
        late = [Miss(MissReason.DEADLINE)]
        assert await client.get(keys_of("a"), Arena(), timeout_s=TIMEOUT_S) == late
        assert not client.is_connected


async def test_chunks_that_arrived_before_the_lie_are_kept() -> None:
    arena = Arena()

    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        header, _, _ = await raw.read()
        await raw.say(header.correlation_id, messages.ChunkHead(1), RECORD)
        await raw.send(
            build_frame(header.correlation_id, messages.ChunkHead(0), len(RECORD)), RECORD[:-3]
        )

    async with hostile_server(behave) as port, client_of(port) as client:
        first, second = await client.get(keys_of("x", "a"), arena, timeout_s=PATIENCE_S)
        assert first == Miss(MissReason.UNAVAILABLE)
        assert isinstance(second, Chunk)
        second.release()
    arena.check_empty()


async def test_a_chunk_that_comes_twice_ends_the_connection() -> None:
    """The first is a chunk; a second one for the same key would take its place, and its memory
    with it.
    """
    arena = Arena()

    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        header, _, _ = await raw.read()
        await raw.say(header.correlation_id, messages.ChunkHead(0), RECORD)
        await raw.say(header.correlation_id, messages.ChunkHead(0), RECORD)
        await raw.say(header.correlation_id, messages.GetEnd([(1, "never_stored")]))
        await forever(raw)

    async with hostile_server(behave) as port, client_of(port) as client:
        first, second = await client.get(keys_of("a", "b"), arena, timeout_s=TIMEOUT_S)
        assert second == Miss(MissReason.UNAVAILABLE), "frames after the second one are ignored"
        assert not client.is_connected
        assert isinstance(first, Chunk)
        first.release()
    arena.check_empty()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (messages.HelloOk(5, "future", 128), VersionError),
        (messages.ErrorMessage("authentication", "no"), AuthenticationError),
        (messages.ErrorMessage("a code of tomorrow", "no"), UnavailableError),
        (messages.Pong(), ProtocolError),
    ],
)
async def test_hello_may_be_refused(answer: messages.Message, error: type[Exception]) -> None:
    async def behave(raw: RawConnection) -> None:
        header, _, _ = await raw.read()
        await raw.say(header.correlation_id, answer)

    async with hostile_server(behave) as port, client_of(port) as client:
        with pytest.raises(error):
            await client.ping()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4])
async def test_a_server_of_another_protocol_is_unavailable(said: bytes) -> None:
    async def behave(raw: RawConnection) -> None:
        await raw.send(said)
        await forever(raw)

    async with hostile_server(behave) as port, client_of(port, connect_timeout_s=0.2) as client:
        with pytest.raises((UnavailableError, ProtocolError)):
            await client.ping()


async def test_a_put_is_not_stored_unless_the_server_says_so() -> None:
    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        header, _, _ = await raw.read()
        await raw.say(header.correlation_id, messages.PutOk(False, "tomorrow's reason"))
        header, _, _ = await raw.read()
        await raw.say(header.correlation_id, messages.RemoveOk(1))

    async with hostile_server(behave) as port, client_of(port) as client:
        assert await client.put([make_chunk(1)]) == [False]
        with pytest.raises(UnavailableError):
            await client.put([make_chunk(1)])


async def test_an_unread_put_ends_at_its_deadline() -> None:
    arena = Arena(64 << 20)

    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        raw.writer.transport.pause_reading()
        await asyncio.sleep(30)

    async with hostile_server(behave) as port, client_of(port) as client:
        chunk = make_chunk(1, payload=bytes(48 << 20), allocate=arena)
        with pytest.raises(UnavailableError):
            await client.put([chunk], timeout_s=TIMEOUT_S)
        assert not client.is_connected
        chunk.release()
    arena.check_empty()


@pytest.mark.parametrize("present", [[True], [True, False, True]])
async def test_wrong_numbers_of_booleans_are_refused(present: list[bool]) -> None:
    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        header, _, _ = await raw.read()
        await raw.say(header.correlation_id, messages.ContainsOk(present))

    async with hostile_server(behave) as port, client_of(port) as client:
        with pytest.raises(ProtocolError, match="one boolean per key"):
            await client.contains(keys_of(1, 2))


async def test_a_cancelled_call_releases_its_memory_in_the_middle_of_a_frame() -> None:
    arena = Arena()
    half = asyncio.Event()

    async def behave(raw: RawConnection) -> None:
        await answer_hello(raw)
        header, _, _ = await raw.read()
        await raw.send(
            build_frame(header.correlation_id, messages.ChunkHead(0), len(RECORD)), RECORD[:15_000]
        )
        half.set()
        await forever(raw)

    async with hostile_server(behave) as port, client_of(port) as client:
        task = asyncio.create_task(client.get(keys_of("a"), arena))
        await half.wait()
        while not arena.allocator.used_bytes:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        arena.check_empty()
        assert client.is_connected
        with pytest.raises(UnavailableError):
            await client.ping(timeout_s=0.2)
        assert not client.is_connected, "the half frame blocks the connection"
