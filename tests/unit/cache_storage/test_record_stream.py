"""Records are read from a body that comes in pieces of any size."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from lmcache_core.record import Chunk, MissReason
from lmcache_storage.record_stream import RecordStream

from tests.fixtures.wire import Arena
from tests.suites.chunks import make_key, make_payload, make_record


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


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
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
            for at in (0, 8, 511)
        ),
        *(
            pytest.param(
                FIRST + SECOND[:length], [make_payload(0)], True, id=f"end in a head: {length}"
            )
            for length in (1, 24, 500)
        ),
        pytest.param(FIRST[:-1], [MissReason.CORRUPT], True, id="end in a payload"),
        pytest.param(
            LARGE + SECOND, [MissReason.NO_MEMORY, make_payload(1)], False, id="without memory"
        ),
    ],
)
async def test_readable_records_are_read(
    data: bytes, expected: list[bytes | MissReason], is_damaged: bool
) -> None:
    assert await payloads(data, 600, Arena(8192)) == (expected, is_damaged)
