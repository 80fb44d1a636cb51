"""What observers log and count of the calls of a guarded tier."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import MissReason
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.guard import Guard
from lmcache_core.storage.observers import MetricsObserver
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, TIER_CHUNKS_TOTAL, Counters

from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key
from tests.suites.faults import ForwardingBackend

RECORD_BYTES = 512 + 1000


@pytest.fixture
def hot() -> LocalCPUBackend:
    return LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy())


class Unavailable(ForwardingBackend):
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        raise UnavailableError("away")


async def test_each_call_is_one_log_line_that_reveals_only_the_hash_of_a_key(
    hot: LocalCPUBackend, caplog: pytest.LogCaptureFixture
) -> None:
    tier, key = Guard(hot), make_key("a", tenant="acme")
    with caplog.at_level(logging.DEBUG):
        await tier.batched_put([make_chunk("a", tenant="acme"), make_chunk("b")])
        await tier.batched_contains([key, make_key("never")])
        [got, _] = await tier.batched_get([key, make_key("never")], Arena())
        await tier.batched_remove([key])
        await tier.clear()
        await Guard(Unavailable(hot)).batched_contains([key])
    payload_of(got)
    short = key.key.chunk_hash[:12]
    lines = [line.split(" ms=") for line in caplog.messages]
    assert [line for line, _ in lines] == [
        f"tier called: tier=memory operation={what}"
        for what in (
            f"put first={short} chunks=2 of=2 bytes={2 * RECORD_BYTES}",
            f"contains first={short} chunks=1 of=2 bytes=0",
            f"get first={short} chunks=1 of=2 bytes={RECORD_BYTES}",
            f"remove first={short} chunks=1 of=1 bytes=0",
            "clear first=- chunks=1 of=0 bytes=0",
            f"contains first={short} chunks=0 of=1 bytes=0",
        )
    ]
    assert [rest.split()[1] for _, rest in lines] == ["error=-"] * 5 + ["error=UnavailableError"]
    for secret in (key.key.chunk_hash, "test/model", "acme"):
        assert secret not in caplog.text


async def test_calls_are_counted_by_operation_and_misses_by_reason(hot: LocalCPUBackend) -> None:
    counters, arena = Counters(), Arena()
    tier = Guard(hot, observers=[MetricsObserver(counters)])
    await tier.batched_put([make_chunk(i) for i in range(3)])
    await tier.batched_contains([make_key(i) for i in range(5)])
    for result in await tier.batched_get([make_key(i) for i in range(1, 5)], arena):
        payload_of(result)
    await tier.batched_remove([make_key(0)])
    await tier.clear()
    figures = tier.stats()
    counted = {name: value for name, value in figures.items() if name not in hot.stats()}
    assert {name: value for name, value in counted.items() if "microseconds" not in name} == {
        "breaker_open": 0,
        "breaker_openings": 0,
        "put_calls": 1,
        "put_chunks": 3,
        "put_bytes": 3 * RECORD_BYTES,
        "contains_calls": 1,
        "contains_chunks": 3,
        "get_calls": 1,
        "get_chunks": 2,
        "get_bytes": 2 * RECORD_BYTES,
        "missed_never_stored": 2,
        "remove_calls": 1,
        "remove_chunks": 1,
        "clear_calls": 1,
        "clear_chunks": 2,
    }
    assert figures["num_chunks"] == 0
    assert counters.value(TIER_CHUNKS_TOTAL, "get") == 2
    assert counters.value(MISSED_CHUNKS_TOTAL, MissReason.NEVER_STORED) == 2
