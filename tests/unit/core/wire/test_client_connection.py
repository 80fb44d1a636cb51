"""A client's wire connection: the wait before the next attempt, names that its server understands,
and an end that has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from lmcache_core.errors import IdentityError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.wire.backoff import Backoff
from lmcache_core.wire.connection import ClientConnection
from lmcache_core.wire.frames import FrameHeader, FrameType
from lmcache_core.wire.lanes import KnownLanes
from lmcache_core.wire.messages import MAX_LANES, DeclareLane, HelloOk, Message

from tests.fixtures.held_clock import HeldClock
from tests.suites.chunks import make_key


def test_wait_doubles_up_to_its_cap_and_starts_over_after_a_success() -> None:
    backoff = Backoff(0.1, 1.0, HeldClock(), jitter=lambda: 1.0)
    assert backoff.wait_s == 0
    waits: list[float] = []
    for _ in range(6):
        backoff.failed()
        waits.append(round(backoff.wait_s, 6))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for _ in range(5000):  # without an overflow
        backoff.failed()
    backoff.succeeded()
    assert backoff.wait_s == 0
    backoff.failed()
    assert round(backoff.wait_s, 6) == 0.1


class StubbornStream:
    """Answers HELLO; then its reader ignores cancellations until it is let go."""

    is_open = True

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.headers = [FrameHeader(FrameType.HELLO_OK, 1, 1, 0)]

    async def send_message(self, *_: object) -> None: ...

    async def read_header(self) -> FrameHeader:
        while not self.headers and not self.let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.let_go.wait()
        return self.headers.pop()

    async def read_message(self, _: FrameHeader) -> HelloOk:
        return HelloOk(1, "server", 4)

    def abort(self) -> None: ...

    async def wait_closed(self) -> None: ...


@pytest.mark.virtual_time
async def test_reader_that_ignores_its_cancellation_is_named_and_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = StubbornStream()
    connection = ClientConnection(stream, "server")  # type: ignore[arg-type]
    await connection.greet(None, "client")
    (reader,) = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        await connection.close()
    assert "lm-client/server" in caplog.text
    stream.let_go.set()
    await asyncio.wait([reader])
    assert isinstance(reader.exception(), IndexError)


def test_jitter_takes_up_to_half_of_a_wait_away_and_time_the_rest() -> None:
    clock = HeldClock()
    backoff = Backoff(1.0, 10.0, clock, jitter=lambda: 0.0)
    backoff.failed()
    assert backoff.wait_s == 0.5
    clock.now_s += 0.25
    assert backoff.wait_s == 0.25
    clock.now_s += 1
    assert backoff.wait_s == 0


HASH = "0f" * 32


class Line:
    """A stream to the server's table."""

    def __init__(self) -> None:
        self.known = KnownLanes()
        self.declared: list[DeclareLane] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def send_message(self, correlation_id: int, message: Message) -> None:
        assert correlation_id == 0
        assert isinstance(message, DeclareLane)
        await self.gate.wait()
        self.known.add(message)
        self.declared.append(message)


def naming(line: Line) -> ClientConnection:
    return ClientConnection(line, "server")  # type: ignore[arg-type]


def key(lane: int = 0, chunk_hash: str = HASH, group: str = "") -> ChunkKey:
    return ChunkKey.of("default", CacheEngineKey("vllm", "m", 1 << 20, lane, chunk_hash, group))


MIXED = [
    [],
    [make_key(i) for i in range(5)],
    [key(), key(1), key(), key(group="window"), key(1, "ff" * 32)],
    [key(chunk_hash=text) for text in ("", "a name", HASH.upper(), " " * 64, "ä" * 64, "0" * 63)],
    [key(lane) for lane in range(MAX_LANES + 3)] + [key(), key(MAX_LANES + 1)],
]


@pytest.mark.parametrize("keys", MIXED, ids=range(len(MIXED)))
async def test_server_understands_the_names_of_the_client(keys: list[ChunkKey]) -> None:
    line = Line()
    lanes = naming(line)
    for _ in range(2):
        names = await lanes.names(keys)
        assert line.known.keys(names, "default", len(keys)) == keys
    assert len(line.declared) == len({message.lane for message in line.declared}) <= MAX_LANES


async def test_cancelled_declaration_is_made_by_the_next_request() -> None:
    line = Line()
    lanes = naming(line)
    line.gate.clear()
    calls = [asyncio.ensure_future(lanes.names([key(lane)])) for lane in (0, 1, 1)]
    await asyncio.sleep(0)
    calls[0].cancel()
    line.gate.set()
    assert [await call for call in calls[1:]] == [[(0, bytes.fromhex(HASH))]] * 2
    assert await lanes.names([key(0)]) == [(1, bytes.fromhex(HASH))]


@pytest.mark.parametrize(
    "bad",
    [
        CacheEngineKey("vllm", "m", 1, -1, HASH),
        CacheEngineKey("vllm", "m" * 2000, 1, 0, HASH),
        CacheEngineKey("vllm", "\ud800", 1, 0, HASH),
        CacheEngineKey("vllm", "m", 1, 0, "x" * 2000),
    ],
    ids=range(4),
)
async def test_key_that_cannot_be_encoded_is_refused_before_it_is_sent(bad: CacheEngineKey) -> None:
    line = Line()
    with pytest.raises(IdentityError):
        await naming(line).names([ChunkKey.of("default", bad)])
    assert not line.declared
