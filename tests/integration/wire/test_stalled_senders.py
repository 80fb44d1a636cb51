"""Memory for what was announced and does not come is given back when the bytes are overdue, not
when all of them would be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
from lmcache_core.wire.messages import Put, PutOk, build_frame
from lmcache_core.wire.served import ServerLimits
from lmcache_core.wire.stream import paced
from lmcache_storage.chunks import receive_record
from lmcache_storage.problems import SlowClientError
from starlette.requests import Request

from tests.fixtures.compat import PUT, listening, request_bytes
from tests.fixtures.wire import MemoryStore, connected, serving, until
from tests.suites.chunks import make_chunk, make_key

pytestmark = pytest.mark.virtual_time

ANNOUNCED_BYTES = 4 << 20
RATE = 32 << 10
SLACK_S = 0.5
"""All of what is announced would have two minutes."""
BOUND_S = 20.0
LIMITS = ServerLimits(transfer_timeout_s=SLACK_S, min_bytes_per_s=RATE)
PIECE_BYTES = 64 << 10


def record_of(num_bytes: int) -> tuple[bytes, bytes]:
    chunk = make_chunk("a", payload=bytes(num_bytes))
    return chunk.head, bytes(num_bytes)


async def test_bytes_that_came_before_buy_a_stalled_sender_no_time() -> None:
    async with asyncio.timeout(BOUND_S) as bound:
        with pytest.raises(TimeoutError):
            async with paced(lambda num_bytes: 0.01 + num_bytes * BOUND_S, lambda: 1_000):
                await asyncio.Event().wait()
    assert not bound.expired()


async def test_a_stalled_put_over_lm() -> None:
    store = MemoryStore()
    async with serving(store, LIMITS) as server, connected(server.port) as raw:
        await raw.hello()
        head, payload = record_of(ANNOUNCED_BYTES)
        await raw.send(build_frame(2, Put(), len(head) + len(payload)), head, payload[:PIECE_BYTES])
        await until(lambda: store.arena.allocator.used_bytes)
        async with asyncio.timeout(BOUND_S):
            assert await raw.is_closed(BOUND_S)
            await store.arena.until_empty()


async def test_a_slow_put_that_keeps_its_rate_is_taken() -> None:
    store = MemoryStore()
    async with serving(store, LIMITS) as server, connected(server.port) as raw:
        await raw.hello()
        head, payload = record_of(16 * PIECE_BYTES)
        await raw.send(build_frame(2, Put(), len(head) + len(payload)), head)
        for at in range(0, len(payload), PIECE_BYTES):
            await raw.send(payload[at : at + PIECE_BYTES])
            await asyncio.sleep(0.1)  # twice as long in all as the slack alone
        _, answer, _ = await raw.read()
        assert answer == PutOk(True, "")


async def test_a_stalled_value_of_an_lmcache_client() -> None:
    limits = {"transfer_timeout_s": SLACK_S, "min_bytes_per_s": RATE}
    async with listening(**limits) as listener, connected(listener.port) as raw:
        await raw.send(request_bytes("v0.3+", PUT, "key", ANNOUNCED_BYTES) + bytes(PIECE_BYTES))
        async with asyncio.timeout(BOUND_S):
            assert await raw.is_closed(BOUND_S)
            await listener.store.arena.until_empty()
        assert listener.closed("slow") == 1


async def test_a_stalled_body_over_rest() -> None:
    store = MemoryStore()
    head, payload = record_of(ANNOUNCED_BYTES)

    async def stalled() -> AsyncIterator[bytes]:
        yield head + payload[:PIECE_BYTES]
        await asyncio.Event().wait()

    request = cast(Request, SimpleNamespace(stream=stalled, headers={}))
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(SlowClientError):
            await receive_record(request, make_key("a"), store, LIMITS)
    store.arena.check_empty()
