"""Embedded tiers that hang, fail to open, or are gone: misses, never waits beyond the deadline,
never errors, nothing leaked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache_core.errors import ConfigError
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record import Allocate, Result
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.fixtures.kv import (
    CHUNK_SIZE,
    HIDDEN,
    NUM_LAYERS,
    empty_kv,
    make_config,
    make_metadata,
    random_kv,
    tokens_of,
)

TOKENS = tokens_of(4 * CHUNK_SIZE)
TIMEOUT_S = 0.15
BLOCKED_S = 2.0


@pytest.fixture
def allocator() -> Iterator[HostMemoryAllocator]:
    made = HostMemoryAllocator(8 << 20)
    yield made
    made.check_integrity()
    assert made.used_bytes == 0


def build(allocator: HostMemoryAllocator, **options: object) -> LMCacheEngine:
    config, metadata = make_config(**{"tier_timeout_s": TIMEOUT_S} | options), make_metadata()
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    return LMCacheEngine(
        config, metadata, allocator, ChunkedTokenDatabase(config, metadata), connector
    )


def disk_options(directory: Path) -> dict[str, object]:
    return {"local_disk": f"file://{directory}/", "max_local_disk_size": 0.01}


@pytest.mark.parametrize("opened_first", [True, False])
def test_an_engine_that_is_not_open_is_an_empty_cache(
    allocator: HostMemoryAllocator, tmp_path: Path, opened_first: bool
) -> None:
    engine = build(allocator, **disk_options(tmp_path))
    if opened_first:
        engine.open()
        engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
        engine.close()
        engine.close()
    engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
    engine.prefetch(TOKENS)
    assert engine.lookup(TOKENS) == 0
    assert not engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
    assert engine.stats() == {}
    engine.close()


def test_a_blocked_loop_is_a_miss_and_its_late_chunks_are_given_back(
    allocator: HostMemoryAllocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that blocks the loop cannot be cancelled: its chunks come when nobody waits any
    more.
    """
    engine = build(allocator, **disk_options(tmp_path))
    engine.open()
    engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
    engine.close()
    read, may_go_on = DiskBackend.batched_get, threading.Event()

    async def blocked(
        self: DiskBackend,
        keys: Sequence[ChunkKey],
        allocate: Allocate,
        timeout_s: float | None = None,
    ) -> list[Result]:
        results = await read(self, keys, allocate)
        may_go_on.wait()
        return results

    monkeypatch.setattr(DiskBackend, "batched_get", blocked)
    engine = build(allocator, **disk_options(tmp_path))
    engine.open()
    try:
        assert not engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        assert engine.counters.value(MISSED_CHUNKS_TOTAL, "unavailable") == 4
    finally:
        may_go_on.set()
    engine.close()


def test_a_disk_that_hangs_is_soon_left_alone(
    allocator: HostMemoryAllocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def hang(
        self: DiskBackend,
        keys: Sequence[ChunkKey],
        allocate: Allocate,
        timeout_s: float | None = None,
    ) -> list[Result]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(DiskBackend, "batched_get", hang)
    engine = build(allocator, **disk_options(tmp_path))
    engine.open()
    for _ in range(20):
        assert not engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
    assert 1 <= asked <= 10, "the disk was asked, and then no more"
    assert engine.counters.value(MISSED_CHUNKS_TOTAL, "breaker_open") > 0
    engine.close()


def test_prefetches_are_bounded(
    allocator: HostMemoryAllocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read = DiskBackend.batched_get

    async def counted(
        self: DiskBackend,
        keys: Sequence[ChunkKey],
        allocate: Allocate,
        timeout_s: float | None = None,
    ) -> list[Result]:
        asked.append(len(keys))
        return await read(self, keys, allocate)

    monkeypatch.setattr(DiskBackend, "batched_get", counted)
    engine = build(allocator, **disk_options(tmp_path))
    engine.open()
    gate = threading.Event()
    engine._store._loop.submit(_hold(gate))  # type: ignore[attr-defined]
    for _ in range(500):
        engine.prefetch(TOKENS)
    gate.set()
    time.sleep(0.2)
    assert 0 < len(asked) <= 64
    engine.prefetch(TOKENS)
    deadline = time.monotonic() + 60.0
    before = len(asked)
    while len(asked) == before:
        assert time.monotonic() < deadline, "prefetching has stopped for good"
        engine.prefetch(TOKENS)
        time.sleep(0.01)
    engine.close()


def test_a_store_waits_for_a_blocked_event_loop_only_a_part_of_a_tiers_deadline(
    allocator: HostMemoryAllocator, tmp_path: Path
) -> None:
    engine = build(allocator, **disk_options(tmp_path) | {"tier_timeout_s": 8.0})
    engine.open()
    gate = threading.Event()
    engine._store._loop.submit(_hold(gate))  # type: ignore[attr-defined]
    begin = time.monotonic()
    engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
    lasted_s = time.monotonic() - begin
    assert lasted_s < HOLD_S - 1
    gate.set()
    engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
    assert engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
    engine.close()


def test_a_remote_where_nobody_listens_costs_a_refused_connection_and_a_log_line(
    allocator: HostMemoryAllocator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with the documented default, `lm://localhost:65432`, on a machine without a storage
    service.
    """
    num_attempts = 0
    connect = asyncio.BaseEventLoop.create_connection

    async def counted(self: asyncio.BaseEventLoop, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_attempts
        num_attempts += 1
        return await connect(self, *args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", counted)
    with socket.socket() as nobody, caplog.at_level(logging.INFO, logger="lmcache_core.storage"):
        nobody.bind(("127.0.0.1", 0))
        url = f"lm://127.0.0.1:{nobody.getsockname()[1]}"
        engine = build(allocator, remote_url=url, tier_timeout_s=5.0)
        engine.open()
        for seed in range(20):
            tokens = tokens_of(len(TOKENS), seed)
            assert not engine.retrieve(tokens, kvcaches=empty_kv(len(tokens))).any()
            engine.store(tokens, kvcaches=random_kv(len(tokens)))
            assert engine.lookup(tokens) == len(tokens)
        engine.close()
    assert 1 <= num_attempts <= 3, (
        "not one for each call; a second and a third only on a machine that is very slow"
    )
    assert len(caplog.messages) == 1
    assert "tier=storage" in caplog.messages[0]
    assert engine.counters.value(MISSED_CHUNKS_TOTAL, "breaker_open") > 0


HOLD_S = 5.0


async def _hold(gate: threading.Event) -> None:
    gate.wait(HOLD_S)


def test_an_engine_that_cannot_open_leaves_nothing_running(tmp_path: Path) -> None:
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    config = make_config(**disk_options(tmp_path))
    LMCacheEngineBuilder.get_or_create("owner", config, make_metadata(), connector)
    threads = threading.active_count()
    try:
        with pytest.raises(ConfigError):
            LMCacheEngineBuilder.get_or_create("rival", config, make_metadata(), connector)
        assert LMCacheEngineBuilder.get("rival") is None
        deadline = time.monotonic() + 60.0
        while threading.active_count() > threads:
            assert time.monotonic() < deadline, "a thread of the engine that could not open goes on"
            time.sleep(0.01)
    finally:
        LMCacheEngineBuilder.destroy("owner")
    LMCacheEngineBuilder.get_or_create("rival", config, make_metadata(), connector)
    LMCacheEngineBuilder.destroy("rival")
