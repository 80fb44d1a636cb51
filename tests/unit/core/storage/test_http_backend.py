"""The remote tier over REST, against scripted answers: how many records it asks for at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.remote.base import RemoteOptions
from lmcache_core.storage.remote.http import (
    BATCH_KEYS,
    FEW_KEYS,
    LARGE_RECORD_BYTES,
    MAX_JSON_BYTES,
    HttpBackend,
    RecordStream,
)

from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

NUM_KEYS = 2 * BATCH_KEYS


class Server:
    """Has every chunk, all of one size."""

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.asked: list[int] = []
        self._names = {make_key(i).key.to_url(): i for i in range(NUM_KEYS)}

    def answer(self, request: httpx.Request) -> httpx.Response:
        names = [self._names[key] for key in msgspec.json.decode(request.content)["keys"]]
        self.asked.append(len(names))
        return httpx.Response(200, content=self._records(names))

    async def _records(self, names: list[int]) -> AsyncIterator[bytes]:
        for name in names:
            chunk = make_chunk(name, payload=bytes(self.payload_bytes))
            yield chunk.head + bytes(chunk.memory.byte_array)


async def read(backend: HttpBackend, num_keys: int, arena: Arena) -> None:
    for result in await backend.batched_get([make_key(i) for i in range(num_keys)], arena):
        assert isinstance(result, Chunk)
        result.release()


async def test_few_large_records_are_asked_for_at_once_and_many_small_ones() -> None:
    server = Server(100)
    backend = HttpBackend("http://test", RemoteOptions(), httpx.MockTransport(server.answer))
    await backend.open()
    arena = Arena(NUM_KEYS << 12)
    await read(backend, FEW_KEYS + BATCH_KEYS + 1, arena)
    assert server.asked == [
        FEW_KEYS,
        BATCH_KEYS,
        1,
    ], "until it has seen one, it takes records for large"
    server.asked.clear()
    await read(backend, NUM_KEYS, arena)
    assert server.asked == [BATCH_KEYS, BATCH_KEYS]
    server.asked.clear()
    server.payload_bytes = LARGE_RECORD_BYTES
    large = Arena(64 << 20)
    await read(backend, 1, large)
    await read(backend, 2 * FEW_KEYS, large)
    assert server.asked == [1, FEW_KEYS, FEW_KEYS]
    await backend.close()


async def streamed(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def contains(answer: bytes) -> list[bool]:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=streamed(answer)))
    backend = HttpBackend("http://localhost", RemoteOptions(), transport)
    await backend.open()
    try:
        return await backend.batched_contains([make_key(1)])
    finally:
        await backend.close()


async def test_fields_of_a_later_version_are_passed_over() -> None:
    assert await contains(b'{"later": [[]], "present": [true]}') == [True]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff",
        b'"\xff"',
        b'{"\xff": [true]}',
        b'{"present": ["\xff"]}',
        b'{"present": []}',
        b"[" * 100_000,
        b'{"later": ' + b"[" * 100_000,
    ],
    ids=range(8),
)
async def test_what_is_no_answer_is_an_error_of_ours(answer: bytes) -> None:
    with pytest.raises(UnavailableError, match=r"contains was not answered|keys were answered"):
        await contains(answer)


async def test_an_answer_without_end_is_not_read_to_it() -> None:
    padding = b" " * (2 * MAX_JSON_BYTES)
    with pytest.raises(UnavailableError, match="an answer of more than"):
        await contains(b'{"present": [true]' + padding + b"}")


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]
        yield b""


async def payloads(data: bytes, size: int, arena: Arena) -> tuple[list[bytes | MissReason], bool]:
    stream = RecordStream(pieces(data, size))
    got: list[bytes | MissReason] = []
    while (head := await stream.next_head()) is not None:
        key = next(key for key in map(make_key, range(5)) if key.key.canonical() == head.header.key)
        result = await stream.chunk(key, arena)
        if isinstance(result, Chunk):
            assert result.key == key
            got.append(bytes(result.memory.byte_array))
            result.release()
        else:
            got.append(result.reason)
    arena.check_empty()
    return got, stream.is_damaged


@pytest.mark.parametrize("size", [1, 7, 512, 1000, 1 << 20])
async def test_all_of_them_are_read(size: int) -> None:
    data = b"".join(make_record(i) for i in range(3))
    assert await payloads(data, size, Arena()) == ([make_payload(i) for i in range(3)], False)


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


FIRST, SECOND, THIRD = make_record(0), make_record(1), make_record(2)
LARGE = make_record(0, make_payload(0, 100_000))


@pytest.mark.parametrize(
    ("data", "expected", "is_damaged"),
    [
        pytest.param(b"", [], False, id="nothing"),
        pytest.param(
            flipped(FIRST, len(FIRST) - 1) + SECOND,
            [MissReason.CORRUPT, make_payload(1)],
            False,
            id="a damaged payload is one miss",
        ),
        *(
            pytest.param(
                FIRST + flipped(SECOND, at) + THIRD,
                [make_payload(0)],
                True,
                id=f"after a damaged head nothing is known: byte {at}",
            )
            for at in (0, 4, 8, 100, 511)
        ),
        *(
            pytest.param(
                FIRST + SECOND[:length], [make_payload(0)], True, id=f"end in a head: {length}"
            )
            for length in (1, 23, 24, 500)
        ),
        pytest.param(FIRST[:-1], [MissReason.CORRUPT], True, id="end in a payload"),
        pytest.param(
            LARGE + SECOND, [MissReason.NO_MEMORY, make_payload(1)], False, id="without memory"
        ),
    ],
)
async def test_what_can_be_read_is_read(
    data: bytes, expected: list[bytes | MissReason], is_damaged: bool
) -> None:
    assert await payloads(data, 600, Arena(8192)) == (expected, is_damaged)


async def test_a_payload_may_be_skipped() -> None:
    stream = RecordStream(pieces(make_record(0) + make_record(1), 100))
    assert await stream.next_head() is not None
    await stream.skip_payload()
    assert await stream.next_head() is not None
    result = await stream.chunk(make_key(1), Arena())
    assert not isinstance(result, Miss)
    assert await stream.next_head() is None
    assert not stream.is_damaged
