"""A tier that is unavailable at the start is opened as soon as it can be."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage import stack as reconnect_module
from lmcache_core.storage.disk import DiskBackend, DiskFiles, backend
from lmcache_core.storage.disk.lock import DirectoryLock
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack

from tests.suites.chunks import held_keys, make_chunk, make_key


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect_module, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(reconnect_module, "MAX_RETRY_S", 0.05)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


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
    assert await stack.drain(5)


async def test_a_disk_that_was_not_there_is_read_and_written_once_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume = tmp_path / "volume"
    async with stack_on(volume / "disk") as (stack, _):
        await store(stack, 1)
    volume.rename(tmp_path / "elsewhere")
    volume.write_text("what is mounted there is away")
    caplog.set_level(logging.INFO)
    async with stack_on(volume / "disk") as (stack, disk):
        assert stack.lower == ()
        assert list(stack.stats()) == ["memory"]
        announcing = asyncio.ensure_future(disk.wait_loaded())
        await store(stack, 2)
        await asyncio.sleep(0.2)
        assert not announcing.done(), "there is nothing to announce yet"
        assert (
            len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 2
        ), "not one line each time"
        volume.unlink()
        (tmp_path / "elsewhere").rename(volume)
        await until(lambda: stack.lower)
        await announcing
        assert held_keys(disk) == [make_key(1)]
        assert await stack.batched_tiers([make_key(1), make_key(2)]) == ["disk", "memory"]
        await store(stack, 3)
        assert set(held_keys(disk)) == {make_key(1), make_key(3)}
    assert "tier available: tier=disk" in caplog.text


async def test_tiers_keep_their_order_however_late_they_come(tmp_path: Path) -> None:
    class Late(DiskBackend):
        def __init__(self, name: str, num_failures: int) -> None:
            super().__init__(tmp_path / name, 1 << 20)
            self.name = name
            self._num_failures = num_failures

        async def open(self) -> None:
            if self._num_failures:
                self._num_failures -= 1
                raise UnavailableError("not yet")
            await super().open()

    tiers = [Late("late", 4), Late("there", 0), Late("soon", 1)]
    stack = TierStack(
        LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy()),
        tiers,
        written=tiers[:1],
    )
    await stack.open()
    assert [tier.name for tier in stack.lower] == ["there"]
    await until(lambda: len(stack.lower) == 3)
    assert stack.lower == tuple(tiers)
    await store(stack, 1)
    assert [bool(tier.held()) for tier in tiers] == [True, False, False]
    await stack.close()


async def test_a_directory_that_another_process_took_meanwhile_is_waited_for(
    tmp_path: Path,
) -> None:
    volume = tmp_path / "volume"
    volume.write_text("away")
    async with stack_on(volume / "disk") as (stack, _):
        volume.unlink()
        (volume / "disk").mkdir(parents=True)
        other = DirectoryLock(DiskBackend(volume / "disk", 1 << 20)._layout.lock)
        other.acquire()
        await asyncio.sleep(0.2)
        assert stack.lower == ()
        other.release()
        await until(lambda: stack.lower)


async def test_the_end_does_not_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("away")
    async with stack_on(tmp_path / "volume" / "disk"):
        began = time.monotonic()
    assert time.monotonic() - began < 1.0


async def test_a_disk_that_hangs_is_waited_for_with_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "ACQUIRE_WAIT_S", 0.02)
    answers = threading.Event()
    num_asked = 0

    class Hanging(DiskFiles):
        def make_directory(self, path: Path) -> None:
            nonlocal num_asked
            num_asked += 1
            assert answers.wait(30)
            super().make_directory(path)

    disk = DiskBackend(tmp_path / "disk", 1 << 20, files=Hanging())
    try:
        for _ in range(5):
            # A wait for the thread at the end would be added to the start of an engine.
            async with asyncio.timeout(backend.CLOSE_WAIT_S / 2):
                with pytest.raises(UnavailableError):
                    await disk.open()
        assert num_asked == 1, "the next attempt waits for the one that has not ended"
        assert "stays locked" not in caplog.text, "it is not locked yet"
    finally:
        answers.set()
    monkeypatch.setattr(backend, "ACQUIRE_WAIT_S", 5.0)
    await disk.open()
    assert await disk.batched_put([make_chunk(1)]) == [True]
    await disk.close()
    again = DiskBackend(tmp_path / "disk", 1 << 20)
    await again.open()
    await again.close()
