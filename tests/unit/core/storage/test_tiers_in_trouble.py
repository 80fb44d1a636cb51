"""A disk that hangs in a write is bypassed, and releases the memory that it no longer reads; a tier
that is unavailable at the start is opened as soon as possible.
"""

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
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk import DiskBackend, DiskFiles, backend
from lmcache_core.storage.disk.backend import DEFAULT_NUM_THREADS
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.guard import Guard, GuardOptions
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack

from tests.fixtures.disk_tier import PATIENCE_S, Clock, Over
from tests.fixtures.loop_clock import FAR_S, LoopClock
from tests.fixtures.waiting import until
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload

ARENA_BYTES = 1 << 20
PAYLOAD_BYTES = 16 << 10
NUM_CHUNKS = ARENA_BYTES // PAYLOAD_BYTES
COOL_DOWN_S = 1.0


class Hanging(DiskFiles):
    """Writes wait for an event, those after the first `num_hanging` do not."""

    def __init__(self, num_hanging: float = float("inf")) -> None:
        self.may_write = threading.Event()
        self.num_begun = 0
        self._num_hanging = num_hanging

    def write(self, fd, buffers):
        self.num_begun += 1
        if self.num_begun <= self._num_hanging:
            assert self.may_write.wait(PATIENCE_S)
        super().write(fd, buffers)


@pytest.fixture
def files() -> Hanging:
    return Hanging()


@pytest.fixture
def disk(tmp_path: Path, files: Hanging) -> DiskBackend:
    return DiskBackend(tmp_path, 8 * ARENA_BYTES, files=files)


@pytest.fixture
async def stack(
    over: Over, disk: DiskBackend, files: Hanging, clock: Clock
) -> AsyncIterator[TierStack]:
    options = GuardOptions(timeout_s=FAR_S, cool_down_s=COOL_DOWN_S, cool_down_cap_s=COOL_DOWN_S)
    tier = Guard(EncodedBackend(disk, Codecs({})), options, is_priced=True, clock=clock)
    yield await over(tier)
    files.may_write.set()


async def put(stack: TierStack, *names: object) -> None:
    for name in names:
        chunk = make_chunk(name, payload=make_payload(name, PAYLOAD_BYTES), allocate=stack.allocate)
        assert await stack.batched_put([chunk]) == [True], "the memory tier takes what is stored"
        chunk.release()


def figures(stack: TierStack) -> dict[str, int]:
    return stack.stats()[DiskBackend.name]


async def until_bypassed(stack: TierStack, files: Hanging) -> None:
    """Let the deadline of the writes pass that hang."""
    await until(lambda: files.num_begun >= min(DEFAULT_NUM_THREADS, len(held_keys(stack.hot))))
    LoopClock().jump(2 * FAR_S)
    await until(lambda: figures(stack)["breaker_open"])


async def test_hung_disk_is_bypassed_and_releases_memory_until_it_answers_again(
    stack: TierStack, files: Hanging, arena: ArenaAllocator, clock: Clock
) -> None:
    await put(stack, *range(NUM_CHUNKS))
    await until_bypassed(stack, files)
    await until(lambda: stack.num_pending_bytes == 0)
    assert figures(stack)["put_failures"] == 1
    assert files.num_begun == DEFAULT_NUM_THREADS
    stack.hot.evict_bytes(ARENA_BYTES)
    assert arena.used_bytes <= DEFAULT_NUM_THREADS * (PAYLOAD_BYTES + 4096), (
        "only what the disk still reads"
    )
    files.may_write.set()
    clock.now += COOL_DOWN_S
    await put(stack, "later")
    await until(lambda: not figures(stack)["breaker_open"])
    await until(lambda: stack.lower[0].contains_now([make_key("later")]) == [True])


async def test_bytes_that_a_hung_write_reads_are_not_reused(
    stack: TierStack, disk: DiskBackend, files: Hanging
) -> None:
    await put(stack, *range(NUM_CHUNKS))
    await until_bypassed(stack, files)
    await put(stack, *range(100, 100 + 4 * NUM_CHUNKS))  # over every free byte of the arena
    files.may_write.set()
    keys = [make_key(i) for i in range(DEFAULT_NUM_THREADS)]
    await until(lambda: set(keys) <= {key for key, _ in disk.held()})
    stack.hot.clear_now()
    found = await stack.batched_get(keys)
    assert [payload_of(result) for result in found] == [
        make_payload(i, PAYLOAD_BYTES) for i in range(DEFAULT_NUM_THREADS)
    ]


async def test_writes_that_finished_while_another_hung_are_announced(
    over: Over, tmp_path: Path
) -> None:
    announced: list[str] = []

    class Listener:
        def stored(self, key, tier, num_bytes):
            announced.append(tier)

    files = Hanging(num_hanging=1)
    disk = DiskBackend(tmp_path, 8 * ARENA_BYTES, files=files)
    tier = Guard(disk, options=GuardOptions(timeout_s=FAR_S))
    stack = await over(tier, listener=Listener())
    chunks = [make_chunk(i, allocate=stack.allocate) for i in range(16)]
    await stack.batched_put(chunks)
    for chunk in chunks:
        chunk.release()
    await until(lambda: len(disk.held()) == 15)
    LoopClock().jump(2 * FAR_S)
    await until(lambda: figures(stack)["breaker_open"])
    assert await stack.drain(PATIENCE_S)
    assert announced.count(disk.name) == 15
    assert figures(stack)["unkept_writes"] == 1
    announced_again = asyncio.Event()
    disk.on_restored = announced_again.set
    files.may_write.set()
    await until(announced_again.is_set)
    assert len(disk.held()) == 16


@pytest.mark.parametrize("how", ["remove", "clear"])
async def test_hung_write_does_not_bring_back_a_removed_chunk(
    stack: TierStack, files: Hanging, how: str
) -> None:
    await put(stack, 1)
    await until_bypassed(stack, files)
    await (stack.batched_remove([make_key(1)]) if how == "remove" else stack.clear())
    files.may_write.set()
    await until(lambda: figures(stack)["reserved_bytes"] == 0)
    assert await stack.batched_tiers([make_key(1)]) == [None]


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
