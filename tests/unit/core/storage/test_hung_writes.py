"""A disk that hangs in a write is bypassed, and gives back what it holds of memory as soon as it
reads it no more.
"""

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
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.guard import Guard, GuardOptions
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack

from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

ARENA_BYTES = 1 << 20
PAYLOAD_BYTES = 16 << 10
NUM_CHUNKS = ARENA_BYTES // PAYLOAD_BYTES
WAIT_S = 20.0


class Hanging(DiskFiles):
    """Writes wait until they are let go."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.num_begun = 0

    def write(self, fd, buffers):
        self.num_begun += 1
        assert self.may_write.wait(60)
        super().write(fd, buffers)


@pytest.fixture
def files() -> Hanging:
    return Hanging()


@pytest.fixture
def arena() -> ArenaAllocator:
    return ArenaAllocator.anonymous(ARENA_BYTES)


@pytest.fixture
def disk(tmp_path: Path, files: Hanging) -> DiskBackend:
    return DiskBackend(tmp_path, 8 * ARENA_BYTES, files=files)


@pytest.fixture
async def stack(
    disk: DiskBackend, files: Hanging, arena: ArenaAllocator
) -> AsyncIterator[TierStack]:
    options = GuardOptions(timeout_s=0.1, cool_down_s=0.2, cool_down_cap_s=0.4)
    tier = Guard(EncodedBackend(disk, Codecs({})), options, is_priced=True)
    made = TierStack(LocalCPUBackend(arena, create_policy()), [tier])
    await made.open()
    yield made
    files.may_write.set()
    await made.close()
    assert arena.used_bytes == 0, "somebody kept a reference"


async def put(stack: TierStack, *names: object) -> None:
    for name in names:
        chunk = make_chunk(name, payload=make_payload(name, PAYLOAD_BYTES), allocate=stack.allocate)
        assert await stack.batched_put([chunk]) == [True], "the memory tier takes what is stored"
        chunk.release()


async def until(is_so) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


def figures(stack: TierStack) -> dict[str, int]:
    return stack.stats()[DiskBackend.name]


async def test_it_is_bypassed_and_memory_comes_back(
    stack: TierStack, files: Hanging, arena: ArenaAllocator
) -> None:
    await put(stack, *range(NUM_CHUNKS))
    await until(lambda: figures(stack)["breaker_open"])
    await until(lambda: stack.num_pending_bytes == 0)
    assert figures(stack)["put_failures"] == 1
    assert files.num_begun == DEFAULT_NUM_THREADS
    stack.hot.evict_bytes(ARENA_BYTES)
    assert arena.used_bytes <= DEFAULT_NUM_THREADS * (PAYLOAD_BYTES + 4096), (
        "what the disk still reads, and nothing else"
    )


async def test_while_it_hangs_stores_go_on(stack: TierStack, files: Hanging) -> None:
    """Probes hang as well; what waits for them is a small part of what may wait for a sound
    tier.
    """
    await put(stack, *range(8))
    await until(lambda: figures(stack)["breaker_open"])
    highest = 0
    for i in range(4 * NUM_CHUNKS):
        await put(stack, i)
        highest = max(highest, stack.num_pending_bytes)
        await asyncio.sleep(0.005)
    assert highest <= ARENA_BYTES // 2 // 8 + PAYLOAD_BYTES
    assert files.num_begun == DEFAULT_NUM_THREADS


async def test_storing_what_the_disk_has_does_not_end_the_bypass(
    stack: TierStack, files: Hanging
) -> None:
    files.may_write.set()
    await put(stack, "known")
    assert await stack.drain(WAIT_S)
    files.may_write.clear()
    await put(stack, "fresh")
    await until(lambda: figures(stack)["breaker_open"])
    for _ in range(2):
        await asyncio.sleep(0.45)  # the longest cool-down is over
        await put(stack, "known")
        assert await stack.drain(WAIT_S)
        assert figures(stack)["breaker_open"]


async def test_bytes_that_a_hung_write_reads_are_not_used_again(
    stack: TierStack, disk: DiskBackend, files: Hanging
) -> None:
    await put(stack, *range(NUM_CHUNKS))
    await until(lambda: figures(stack)["breaker_open"])
    await put(stack, *range(100, 100 + 4 * NUM_CHUNKS))  # over every byte of the arena that is free
    files.may_write.set()
    keys = [make_key(i) for i in range(DEFAULT_NUM_THREADS)]
    await until(lambda: set(keys) <= {key for key, _ in disk.held()})
    stack.hot.clear_now()
    found = await stack.batched_get(keys)
    assert [payload_of(result) for result in found] == [
        make_payload(i, PAYLOAD_BYTES) for i in range(DEFAULT_NUM_THREADS)
    ]


async def test_when_the_disk_is_well_again_it_is_written_to(
    stack: TierStack, files: Hanging
) -> None:
    await put(stack, *range(8))
    await until(lambda: figures(stack)["breaker_open"])
    files.may_write.set()

    async def is_kept() -> bool:
        await put(stack, "later")
        return (await stack.lower[0].batched_contains([make_key("later")]))[0]

    async with asyncio.timeout(WAIT_S):
        while not await is_kept():
            await asyncio.sleep(0.05)
    assert not figures(stack)["breaker_open"]


async def test_what_reached_the_disk_although_another_write_hung_is_announced(
    tmp_path: Path, arena: ArenaAllocator
) -> None:
    class OneHangs(Hanging):
        def write(self, fd, buffers):
            self.num_begun += 1
            if self.num_begun == 1:
                assert self.may_write.wait(60)
            DiskFiles.write(self, fd, buffers)

    told: list[str] = []

    class Listener:
        def stored(self, key, tier, num_bytes):
            told.append(tier)

    files = OneHangs()
    disk = DiskBackend(tmp_path, 8 * ARENA_BYTES, files=files)
    tier = Guard(disk, options=GuardOptions(timeout_s=1.0))
    hot = LocalCPUBackend(arena, create_policy())
    stack = TierStack(hot, [tier], listener=Listener())
    await stack.open()
    chunks = [
        make_chunk(i, payload=make_payload(i, PAYLOAD_BYTES), allocate=stack.allocate)
        for i in range(16)
    ]
    await stack.batched_put(chunks)
    for chunk in chunks:
        chunk.release()
    assert await stack.drain(WAIT_S)
    assert len(disk.held()) == 15
    assert told.count(disk.name) == 15
    assert figures(stack)["unkept_writes"] == 1
    announced_again = asyncio.Event()
    disk.on_restored = announced_again.set
    files.may_write.set()
    async with asyncio.timeout(WAIT_S):
        await announced_again.wait()
    assert len(disk.held()) == 16
    await stack.close()


@pytest.mark.parametrize("how", ["remove", "clear"])
async def test_a_hung_write_does_not_bring_back_what_was_removed(
    stack: TierStack, files: Hanging, how: str
) -> None:
    await put(stack, 1)
    await until(lambda: files.num_begun == 1)
    await until(lambda: figures(stack)["breaker_open"])
    await (stack.batched_remove([make_key(1)]) if how == "remove" else stack.clear())
    files.may_write.set()
    await until(lambda: figures(stack)["reserved_bytes"] == 0)
    assert await stack.batched_tiers([make_key(1)]) == [None]


async def test_a_start_on_a_disk_that_hangs_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.storage.disk.backend.ACQUIRE_WAIT_S", 0.05)
    monkeypatch.setattr("lmcache_core.storage.disk.backend.CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr("lmcache_core.storage.stack.FIRST_RETRY_S", 0.05)
    may_go_on = threading.Event()

    class Stuck(DiskFiles):
        def make_directory(self, path):
            assert may_go_on.wait(60)
            super().make_directory(path)

    disk = DiskBackend(tmp_path / "disk", ARENA_BYTES, files=Stuck())
    stack = TierStack(
        LocalCPUBackend(ArenaAllocator.anonymous(ARENA_BYTES), create_policy()), [disk]
    )
    async with asyncio.timeout(WAIT_S):
        await stack.open()
    assert stack.lower == ()
    may_go_on.set()
    await until(lambda: stack.lower)
    await stack.close()
