"""Names on a connection: what a client sends is what its server understands."""

from __future__ import annotations

import asyncio

import pytest
from lmcache_core.errors import IdentityError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.wire.connection import ClientConnection
from lmcache_core.wire.lanes import KnownLanes
from lmcache_core.wire.messages import MAX_LANES, DeclareLane, Message

from tests.suites.chunks import make_key

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
