"""Embedded tiers that block, fail to open, or are gone: no errors, bounded waits, nothing left
running; and engines that are closed and opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.engine import LMCacheEngineBuilder
from lmcache_core.errors import ConfigError
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record import Allocate, Result
from lmcache_core.storage import manager
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk.layout import DiskLayout
from lmcache_core.storage.disk.lock import DirectoryLock
from lmcache_core.storage.manager import MAX_PREFETCHES
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL

from tests.fixtures.embedded import PATIENT, Embedded, build_engine, embedded_engine, until
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
from tests.fixtures.prompts import CHUNK_BYTES, kv_of
from tests.fixtures.prompts import tokens_of as prompt
from tests.suites.faults import ForwardingBackend

TOKENS, OTHER = tokens_of(4 * CHUNK_SIZE), tokens_of(4 * CHUNK_SIZE, 9)
PATIENCE_S = 60.0


class Blocking(ForwardingBackend):
    """Blocks the event loop in its first read until it may go on; knows what was asked for."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self.may_go_on = threading.Event()
        self.is_blocked = False
        self.asked = set[ChunkKey]()

    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool] | None:
        return self._backend.contains_now(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        self.asked.update(keys)
        self.is_blocked = True
        may_go_on = self.may_go_on.wait(PATIENCE_S)
        self.is_blocked = False
        assert may_go_on
        return await super().batched_get(keys, allocate, timeout_s)


@contextlib.contextmanager
def blocked_engine(directory: Path, **options: object) -> Iterator[tuple[Embedded, Blocking]]:
    """An engine whose event loop is blocked, with all chunks of `TOKENS` on disk."""
    with embedded_engine(directory, wrap=Blocking, **(PATIENT | options)) as cache:
        cache.engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
        cache.forget_hot()
        tier = cache.lower(Blocking)
        assert isinstance(tier, Blocking)
        try:
            cache.engine.prefetch(OTHER)
            until(lambda: tier.asked)
            yield cache, tier
        finally:
            tier.may_go_on.set()


def test_a_lookup_on_disk_waits_for_no_event_loop(tmp_path: Path) -> None:
    with blocked_engine(tmp_path) as (cache, _):
        assert cache.engine.lookup(TOKENS, ["LocalDiskBackend"]) == len(TOKENS)
        assert cache.engine.lookup(OTHER) == 0


def test_a_store_waits_for_a_blocked_event_loop_only_a_part_of_the_deadline_of_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "PUT_SHARE", 4 * manager.PUT_SHARE)  # not to wait for long
    with blocked_engine(tmp_path, tier_timeout_s=PATIENCE_S + 4.0) as (cache, tier):
        cache.engine.store(OTHER, kvcaches=random_kv(len(OTHER)))
        assert tier.is_blocked
        tier.may_go_on.set()
        cache.engine.store(OTHER, kvcaches=random_kv(len(OTHER)))
        assert cache.engine.retrieve(OTHER, kvcaches=empty_kv(len(OTHER))).any()


def test_prefetches_are_bounded(tmp_path: Path) -> None:
    with blocked_engine(tmp_path) as (cache, tier):
        known = len(tier.asked) + len(TOKENS) // CHUNK_SIZE
        for seed in range(10 * MAX_PREFETCHES):
            cache.engine.prefetch(tokens_of(CHUNK_SIZE, 100 + seed))
        tier.may_go_on.set()

        def is_lifted() -> bool:
            cache.engine.prefetch(TOKENS)
            return cache.engine.lookup(TOKENS, ["Hot"]) == len(TOKENS)

        until(is_lifted, "prefetching has stopped for good")
        assert 0 < len(tier.asked) - known < MAX_PREFETCHES


def test_an_absent_remote_costs_a_refused_connection_and_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with the documented default, `lm://localhost:65432`, on a machine without a storage
    service.
    """
    num_attempts, num_calls = 0, 60
    connect = asyncio.BaseEventLoop.create_connection

    async def counted(self: asyncio.BaseEventLoop, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_attempts
        num_attempts += 1
        return await connect(self, *args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", counted)
    with socket.socket() as unused, caplog.at_level(logging.INFO, logger="lmcache_core.storage"):
        unused.bind(("127.0.0.1", 0))
        url = f"lm://127.0.0.1:{unused.getsockname()[1]}"
        with embedded_engine(remote_url=url, tier_timeout_s=PATIENCE_S) as cache:
            for seed in range(num_calls // 3):
                tokens = tokens_of(len(TOKENS), seed)
                assert not cache.engine.retrieve(tokens, kvcaches=empty_kv(len(tokens))).any()
                cache.engine.store(tokens, kvcaches=random_kv(len(tokens)))
                assert cache.engine.lookup(tokens) == len(tokens)
    assert 1 <= num_attempts < num_calls / 3, "not one for each call"
    assert len(caplog.messages) == 1
    assert "tier=storage" in caplog.messages[0]
    assert cache.engine.counters.value(MISSED_CHUNKS_TOTAL, "breaker_open") > 0


def test_an_engine_that_cannot_open_leaves_nothing_running(tmp_path: Path) -> None:
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    config = make_config(local_disk=f"file://{tmp_path}/", max_local_disk_size=0.01)
    LMCacheEngineBuilder.get_or_create("owner", config, make_metadata(), connector)
    num_threads = threading.active_count()
    try:
        with pytest.raises(ConfigError):
            LMCacheEngineBuilder.get_or_create("rival", config, make_metadata(), connector)
        assert LMCacheEngineBuilder.get("rival") is None
        until(lambda: threading.active_count() <= num_threads, "a thread is left")
    finally:
        LMCacheEngineBuilder.destroy("owner")
    LMCacheEngineBuilder.get_or_create("rival", config, make_metadata(), connector)
    LMCacheEngineBuilder.destroy("rival")


STORED = prompt((0, 1, 2))


def test_closing_reads_no_secret_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    engine = build_engine(
        HostMemoryAllocator(CHUNK_BYTES),
        remote_url="lm://127.0.0.1:9",
        remote_token_file=str(token),
    )
    engine.open()
    token.unlink()
    engine.close()
    with pytest.raises(ConfigError, match="remote_token_file"):
        engine.open()
    token.write_text("another")
    engine.open()
    engine.close()


def test_an_engine_that_could_not_open_works_once_it_can(tmp_path: Path) -> None:
    lock = DirectoryLock(DiskLayout(tmp_path).lock)
    lock.acquire()
    engine = build_engine(
        HostMemoryAllocator(8 * CHUNK_BYTES),
        tmp_path,
        tier_timeout_s=60.0,
        prefill_tokens_per_s=0.001,
    )
    with pytest.raises(ConfigError, match="in use by another process"):
        engine.open()
    lock.release()
    engine.open()
    engine.store(STORED, kvcaches=kv_of(STORED))
    engine.close()
    with embedded_engine(tmp_path, tier_timeout_s=60.0, prefill_tokens_per_s=0.001) as cache:
        assert cache.engine.lookup(STORED) == len(STORED)


def test_a_released_directory_is_free_while_a_forked_child_has_its_lock_open(
    tmp_path: Path,
) -> None:
    """As a child does between the fork and its first instruction."""
    lock, other = DirectoryLock(tmp_path / "lock"), DirectoryLock(tmp_path / "lock")
    lock.acquire()
    [fd] = [
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and link.readlink() == tmp_path / "lock"
    ]
    copy = os.dup(fd)
    lock.release()
    other.acquire()
    other.release()
    os.close(copy)
