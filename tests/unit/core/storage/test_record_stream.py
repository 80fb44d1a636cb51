"""Records that come back to back, in pieces of any size."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.remote.http import RecordStream
from lmcache_core.testing.chunks import make_key, make_payload, make_record

from tests.fixtures.wire import Arena


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


async def test_nothing_is_nothing() -> None:
    assert await payloads(b"", 10, Arena()) == ([], False)


async def test_a_damaged_payload_is_one_miss() -> None:
    first = bytearray(make_record(0))
    first[-1] ^= 1
    assert await payloads(bytes(first) + make_record(1), 600, Arena()) == (
        [MissReason.CORRUPT, make_payload(1)],
        False,
    )


@pytest.mark.parametrize("at", [0, 4, 8, 100, 511])
async def test_behind_a_damaged_head_nothing_is_known(at: int) -> None:
    second = bytearray(make_record(1))
    second[at] ^= 1
    assert await payloads(make_record(0) + bytes(second) + make_record(2), 600, Arena()) == (
        [make_payload(0)],
        True,
    )


@pytest.mark.parametrize("length", [1, 23, 24, 500])
async def test_an_end_within_a_head(length: int) -> None:
    assert await payloads(make_record(0) + make_record(1)[:length], 600, Arena()) == (
        [make_payload(0)],
        True,
    )


async def test_an_end_within_a_payload() -> None:
    assert await payloads(make_record(0)[:-1], 600, Arena()) == ([MissReason.CORRUPT], True)


async def test_without_memory_the_payload_is_passed_over() -> None:
    large = make_record(0, make_payload(0, 100_000))
    assert await payloads(large + make_record(1), 5000, Arena(8192)) == (
        [MissReason.NO_MEMORY, make_payload(1)],
        False,
    )


async def test_a_payload_may_be_skipped() -> None:
    stream = RecordStream(pieces(make_record(0) + make_record(1), 100))
    assert await stream.next_head() is not None
    await stream.skip_payload()
    assert await stream.next_head() is not None
    result = await stream.chunk(make_key(1), Arena())
    assert not isinstance(result, Miss)
    assert await stream.next_head() is None
    assert not stream.is_damaged
