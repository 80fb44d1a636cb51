"""A disk that hangs in a write is bypassed, and releases the memory that it no longer reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk.backend import DEFAULT_NUM_THREADS
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.guard import Guard, GuardOptions
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
