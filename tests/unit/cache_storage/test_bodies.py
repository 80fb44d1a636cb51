"""Records in bodies: read from pieces of any size; answers release their chunks whether or not the
client reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import pytest
from fastapi import Response
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.served import LocalStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.wire.served import ServerLimits
from lmcache_storage.chunks import SLICE_BYTES, RecordResponse, RecordsResponse
from lmcache_storage.record_stream import RecordStream

from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

pytestmark = pytest.mark.virtual_time

LIMITS = ServerLimits(get_batch=2)
NUM_CHUNKS = 5
PAYLOAD_BYTES = SLICE_BYTES + 1


class Client:
    """Takes `patience` messages, then calls `then` before each further one."""

    def __init__(self, patience: int, then: Callable[[], Awaitable[Any]] | None = None) -> None:
        self._patience = patience
        self._then = then
        self.messages: list[MutableMapping[str, Any]] = []

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if len(self.messages) >= self._patience and self._then is not None:
            await self._then()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)


async def stall() -> None:
    await asyncio.Event().wait()


async def vanish() -> None:
    raise ConnectionResetError


@pytest.fixture
async def stack() -> AsyncIterator[TierStack]:
    arena = ArenaAllocator.anonymous(8 << 20)
    made = TierStack(LocalCPUBackend(arena, create_policy()))
    await made.open()
    assert all(
        await made.batched_put(
            [make_chunk(i, payload=make_payload(i, PAYLOAD_BYTES)) for i in range(NUM_CHUNKS)]
        )
    )
    yield made
    await made.close()
    assert arena.used_bytes == 0, "a reference was not given back"


async def one(stack: TierStack) -> Response:
    [chunk] = stack.hot.get_many([make_key(0)])
    assert chunk is not None
    return RecordResponse(chunk, LIMITS)


async def many(stack: TierStack) -> Response:
    return RecordsResponse(
        LocalStore(stack, lambda: True), [make_key(i) for i in range(NUM_CHUNKS)], LIMITS
    )


async def receive() -> MutableMapping[str, Any]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("make", [one, many])
async def test_client_gets_all_records(
    stack: TierStack, make: Callable[[TierStack], Awaitable[Response]]
) -> None:
    client = Client(0)
    await (await make(stack))({"type": "http"}, receive, client)
    names = range(1 if make is one else NUM_CHUNKS)
    wanted = [make_chunk(i, payload=make_payload(i, PAYLOAD_BYTES)) for i in names]
    assert client.body == b"".join(chunk.head + bytes(chunk.memory.byte_array) for chunk in wanted)
    assert client.is_complete


@pytest.mark.parametrize("make", [one, many])
@pytest.mark.parametrize("patience", [1, 3])
async def test_answer_to_a_stalled_client_is_abandoned(
    stack: TierStack, make: Callable[[TierStack], Awaitable[Response]], patience: int
) -> None:
    client = Client(patience, stall)
    await (await make(stack))({"type": "http"}, receive, client)
    assert not client.is_complete or len(client.messages) == 1


@pytest.mark.parametrize("make", [one, many])
@pytest.mark.parametrize("patience", [0, 3])
async def test_lost_client_holds_no_chunks(
    stack: TierStack, make: Callable[[TierStack], Awaitable[Response]], patience: int
) -> None:
    with pytest.raises(ConnectionResetError):
        await (await make(stack))({"type": "http"}, receive, Client(patience, vanish))


async def test_sent_bytes_do_not_change_with_the_memory(
    stack: TierStack,
) -> None:
    client = Client(0)
    await (await one(stack))({"type": "http"}, receive, client)
    stack.hot.clear_now()
    memory = stack.allocate(7 << 20)
    assert memory is not None
    memory.byte_array[:] = b"\xa5" * len(memory.byte_array)
    memory.ref_count_down()
    assert client.body.endswith(make_payload(0, PAYLOAD_BYTES))


@pytest.mark.parametrize(
    ("names", "num_found"),
    [([], 0), ([0, "absent"], 1), ([0, 1, 2], None)],
)
async def test_answer_in_one_step_has_its_length(
    stack: TierStack, names: list[object], num_found: int | None
) -> None:
    client = Client(0)
    answer = RecordsResponse(
        LocalStore(stack, lambda: True), [make_key(name) for name in names], LIMITS
    )
    await answer({"type": "http"}, receive, client)
    lengths = [value for name, value in client.messages[0]["headers"] if name == b"content-length"]
    record_bytes = make_chunk(0, payload=make_payload(0, PAYLOAD_BYTES)).num_bytes
    assert lengths == ([] if num_found is None else [str(len(client.body)).encode()])
    assert len(client.body) == record_bytes * (len(names) if num_found is None else num_found)


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
