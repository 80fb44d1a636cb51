"""A tier that is unavailable at the start is opened as soon as possible."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage import stack as reconnect_module
from lmcache_core.storage.disk import DiskBackend, DiskFiles, backend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack

from tests.fixtures.disk_tier import PATIENCE_S
from tests.fixtures.loop_clock import LoopClock
from tests.fixtures.waiting import until
from tests.suites.chunks import held_keys, make_chunk, make_key


@asynccontextmanager
async def stack_on(path: Path) -> AsyncIterator[tuple[TierStack, DiskBackend]]:
    disk = DiskBackend(path, 1 << 20)
    stack = TierStack(LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy()), [disk])
    await stack.open()
    try:
        yield stack, disk
    finally:
        await stack.close()


async def store(stack: TierStack, name: int) -> None:
    chunk = make_chunk(name)
    assert await stack.batched_put([chunk]) == [True]
    assert await stack.drain(60)


async def test_disk_that_was_missing_is_read_and_written_once_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect_module, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(reconnect_module, "MAX_RETRY_S", 0.01)
    volume = tmp_path / "volume"
    async with stack_on(volume / "disk") as (stack, _):
        await store(stack, 1)
    volume.rename(tmp_path / "elsewhere")
    volume.write_text("nothing is mounted")
    caplog.set_level(logging.INFO)
    async with stack_on(volume / "disk") as (stack, disk):
        assert stack.lower == ()
        assert list(stack.stats()) == ["memory"]
        announcing = asyncio.ensure_future(disk.wait_loaded())
        await store(stack, 2)
        assert not announcing.done(), "there is nothing to announce yet"
        volume.unlink()
        (tmp_path / "elsewhere").rename(volume)
        await until(lambda: stack.lower)
        await announcing
        assert held_keys(disk) == [make_key(1)]
        assert await stack.batched_tiers([make_key(1), make_key(2)]) == ["disk", "memory"]
        await store(stack, 3)
        assert set(held_keys(disk)) == {make_key(1), make_key(3)}
    assert "tier available: tier=disk" in caplog.text


class Late(LocalCPUBackend):
    """Fails to open the first `num_failures` times; every second time another process owns it."""

    def __init__(self, name: str, num_failures: float) -> None:
        super().__init__(ArenaAllocator.anonymous(1 << 20), create_policy())
        self.name = name
        self.num_failures = num_failures
        self.num_attempts = 0

    async def open(self) -> None:
        self.num_attempts += 1
        if self.num_attempts <= self.num_failures:
            raise (ConfigError if self.num_attempts % 2 == 0 else UnavailableError)("not yet")
        await super().open()


@pytest.mark.virtual_time
async def test_tiers_keep_their_order_whenever_they_become_available(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers = [Late("late", 9), Late("there", 0), Late("soon", 1)]
    hot = LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy())
    stack = TierStack(hot, tiers, written=tiers[:1])
    await stack.open()
    assert [tier.name for tier in stack.lower] == ["there"]
    await until(lambda: len(stack.lower) == 3, seconds=600)
    assert stack.lower == tuple(tiers)
    await store(stack, 1)
    assert [bool(tier.held()) for tier in tiers] == [True, False, False]
    await stack.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 3, "not one for each attempt"


async def test_hanging_disk_occupies_one_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    num_asked = 0

    class Hanging(DiskFiles):
        def make_directory(self, path: Path) -> None:
            nonlocal num_asked
            num_asked += 1
            asked.set()
            assert answers.wait(PATIENCE_S)
            super().make_directory(path)

    disk = DiskBackend(tmp_path / "disk", 1 << 20, files=Hanging())
    clock, asked = LoopClock(), threading.Event()
    now = asyncio.get_running_loop().time
    try:
        for _ in range(3):
            opening = asyncio.ensure_future(disk.open())
            await asyncio.to_thread(asked.wait, PATIENCE_S)
            clock.jump(backend.ACQUIRE_WAIT_S)
            began = now()
            with pytest.raises(UnavailableError):
                await opening
            assert now() - began < 2 * backend.ACQUIRE_WAIT_S, "it does not wait for the thread"
        assert num_asked == 1, "the next attempt waits for the one that has not ended"
        assert "stays locked" not in caplog.text, "it is not locked yet"
    finally:
        answers.set()
    await disk.open()
    assert await disk.batched_put([make_chunk(1)]) == [True]
    await disk.close()
    again = DiskBackend(tmp_path / "disk", 1 << 20)
    await again.open()
    await again.close()
