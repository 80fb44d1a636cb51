"""The guard of a tier: failures are misses, every call ends, and a tier that keeps failing is left
alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage import guard as module
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.guard import Guard, GuardOptions

from tests.fixtures.disk_tier import Clock
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key

KEYS = [make_key(1), make_key(2)]
OPTIONS = GuardOptions(num_failures=3, cool_down_s=1.0, cool_down_cap_s=4.0, slow_call_s=0.5)


def plain(num_bytes: int) -> MemoryObj:
    return BytesBufferMemoryObj(bytearray(num_bytes))


class Moody(StorageBackend):
    """Fails as told: an exception to raise, or results to give."""

    name = "Moody"

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.results: list[Result] = [make_chunk(1), Miss(MissReason.NEVER_STORED)]
        self.num_calls = 0
        self.gate: asyncio.Event | None = None

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._call()
        return [True] * len(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        await self._call()
        return list(self.results)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await self._call()
        return [True] * len(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        await self._call()
        return len(keys)

    async def clear(self, tenant: str | None = None) -> int:
        await self._call()
        return 7

    def stats(self) -> dict[str, int]:
        return {"num_chunks": 5}

    async def _call(self) -> None:
        self.num_calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def inner() -> Moody:
    return Moody()


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def breaker(inner: Moody, clock: Clock) -> Guard:
    return Guard(inner, OPTIONS, clock=clock)


async def trip(breaker: Guard, inner: Moody) -> None:
    inner.error = UnavailableError("gone")
    for _ in range(OPTIONS.num_failures):
        await breaker.batched_contains(KEYS)
    assert breaker.is_bypassed


async def test_while_all_is_well_it_is_not_there(breaker: Guard, inner: Moody) -> None:
    await breaker.open()
    assert breaker.name == "Moody"
    assert await breaker.batched_contains(KEYS) == [True, True]
    assert await breaker.batched_get(KEYS, plain) == inner.results
    assert await breaker.batched_put([make_chunk(1)]) == [True]
    assert await breaker.batched_remove(KEYS) == 2
    assert await breaker.clear() == 7
    assert (
        breaker.stats().items()
        >= {"num_chunks": 5, "breaker_open": 0, "breaker_openings": 0}.items()
    )
    await breaker.close()


@pytest.mark.parametrize("error", [UnavailableError("gone"), TimeoutError()])
async def test_failures_are_misses(breaker: Guard, inner: Moody, error: Exception) -> None:
    inner.error = error
    assert await breaker.batched_get(KEYS, plain) == [Miss(MissReason.UNAVAILABLE)] * 2
    assert await breaker.batched_contains(KEYS) == [False, False]
    assert breaker.is_bypassed is False


async def test_open_it_answers_at_once(breaker: Guard, inner: Moody) -> None:
    await trip(breaker, inner)
    num_calls = inner.num_calls
    assert await breaker.batched_get(KEYS, plain) == [Miss(MissReason.BREAKER_OPEN)] * 2
    assert await breaker.batched_contains(KEYS) == [False, False]
    assert await breaker.batched_put([make_chunk(1)]) == [False]
    assert await breaker.batched_remove(KEYS) == 0
    assert await breaker.clear() == 0
    assert inner.num_calls == num_calls
    assert breaker.stats()["breaker_open"] == 1


async def test_only_failures_in_a_row_count(breaker: Guard, inner: Moody) -> None:
    for _ in range(10):
        inner.error = UnavailableError("gone")
        for _ in range(OPTIONS.num_failures - 1):
            await breaker.batched_contains(KEYS)
        inner.error = None
        await breaker.batched_contains(KEYS)
    assert not breaker.is_bypassed


async def test_a_probe_closes_it(breaker: Guard, inner: Moody, clock: Clock) -> None:
    await trip(breaker, inner)
    inner.error = None
    clock.now += 0.99
    assert await breaker.batched_contains(KEYS) == [False, False]
    clock.now += 0.01
    assert await breaker.batched_contains(KEYS) == [True, True]
    assert not breaker.is_bypassed


async def test_cool_downs_grow_to_their_cap_and_begin_anew(
    breaker: Guard, inner: Moody, clock: Clock
) -> None:
    await trip(breaker, inner)
    for wait_s in (1.0, 2.0, 4.0, 4.0, 4.0):
        num_calls = inner.num_calls
        clock.now += wait_s - 0.01
        await breaker.batched_contains(KEYS)
        assert inner.num_calls == num_calls
        clock.now += 0.02
        await breaker.batched_contains(KEYS)
        assert inner.num_calls == num_calls + 1
    clock.now += 4.1
    inner.error = None
    await breaker.batched_contains(KEYS)
    await trip(breaker, inner)
    num_calls = inner.num_calls
    clock.now += 1.01
    await breaker.batched_contains(KEYS)
    assert inner.num_calls == num_calls + 1
    assert breaker.stats()["breaker_openings"] == 2


async def test_one_probe_at_a_time(breaker: Guard, inner: Moody, clock: Clock) -> None:
    await trip(breaker, inner)
    inner.error, inner.gate = None, asyncio.Event()
    clock.now += 1.01
    num_calls = inner.num_calls
    calls = [asyncio.create_task(breaker.batched_contains(KEYS)) for _ in range(5)]
    await asyncio.sleep(0)
    assert inner.num_calls == num_calls + 1
    inner.gate.set()
    assert sorted(await asyncio.gather(*calls)) == [[False, False]] * 4 + [[True, True]]
    assert not breaker.is_bypassed


@pytest.mark.parametrize("reason", [MissReason.DEADLINE, MissReason.UNAVAILABLE])
async def test_misses_for_want_of_the_tier_count(
    breaker: Guard, inner: Moody, reason: MissReason
) -> None:
    inner.results = [Miss(MissReason.NEVER_STORED), Miss(reason)]
    for _ in range(OPTIONS.num_failures):
        assert await breaker.batched_get(KEYS, plain) == inner.results
    assert breaker.is_bypassed


async def test_ordinary_misses_do_not(breaker: Guard, inner: Moody) -> None:
    kinds: list[list[Result]] = [
        [Miss(MissReason.CORRUPT)] * 2,
        [Miss(MissReason.NEVER_STORED)] * 2,
        [make_chunk(1), Miss(MissReason.DEADLINE)],
    ]
    for results in kinds:
        inner.results = results
        for _ in range(10):
            await breaker.batched_get(KEYS, plain)
    assert not breaker.is_bypassed


@pytest.mark.parametrize(("lasted_s", "opens"), [(0.4, False), (0.6, True)])
async def test_a_call_given_up_counts_when_it_was_slow(
    breaker: Guard, inner: Moody, clock: Clock, lasted_s: float, opens: bool
) -> None:
    inner.gate = asyncio.Event()
    for _ in range(OPTIONS.num_failures):
        task = asyncio.create_task(breaker.batched_get(KEYS, plain))
        await asyncio.sleep(0)
        clock.now += lasted_s
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert breaker.is_bypassed is opens


async def test_a_probe_given_up_early_leaves_its_place(
    breaker: Guard, inner: Moody, clock: Clock
) -> None:
    await trip(breaker, inner)
    inner.error, inner.gate = None, asyncio.Event()
    clock.now += 1.01
    task = asyncio.create_task(breaker.batched_contains(KEYS))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    inner.gate.set()
    assert await breaker.batched_contains(KEYS) == [True, True]


async def test_a_bug_is_not_hidden(breaker: Guard, inner: Moody, clock: Clock) -> None:
    inner.error = KeyError("a bug")
    with pytest.raises(KeyError):
        await breaker.batched_contains(KEYS)
    await trip(breaker, inner)
    clock.now += 1.01
    inner.error = KeyError("a bug")
    with pytest.raises(KeyError):
        await breaker.batched_contains(KEYS)
    inner.error = None
    assert await breaker.batched_contains(KEYS) == [True, True]


async def test_one_line_per_change(
    breaker: Guard, inner: Moody, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await trip(breaker, inner)
    for _ in range(20):
        clock.now += 0.5
        await breaker.batched_get(KEYS, plain)
    inner.error = None
    clock.now += 10
    for _ in range(20):
        await breaker.batched_get(KEYS, plain)
    assert [record.getMessage() for record in caplog.records] == [
        "tier bypassed until a probe succeeds: tier=Moody failures=3 last='gone'",
        "tier answers again: tier=Moody",
    ]


class Knowing(Moody):
    """Knows what it holds, so that it answers for known chunks without its device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[ChunkKey, int] = {}
        self.num_stored = 0

    @property
    def num_written(self) -> int:
        return self.num_stored

    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key in self.names for key in keys]

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.contains_now(keys)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        if any(chunk.key not in self.names for chunk in chunks):
            await self._call()
            self.names |= {chunk.key: chunk.num_bytes for chunk in chunks}
            self.num_stored += 1
        return [True] * len(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        known = [key for key in keys if key in self.names]
        if known:
            await self._call()
        for key in known:
            del self.names[key]
        return len(known)

    async def clear(self, tenant: str | None = None) -> int:
        return await self.batched_remove(list(self.names))

    def held(self) -> list[tuple[ChunkKey, int]]:
        return list(self.names.items())


async def test_a_bypassed_tier_has_nothing_now(clock: Clock) -> None:
    inner = Knowing()
    guard = Guard(inner, GuardOptions(num_failures=1), clock=clock)
    chunk = make_chunk("known")
    assert await guard.batched_put([chunk]) == [True]
    assert guard.contains_now([chunk.key, make_chunk("other").key]) == [True, False]
    inner.error = UnavailableError("gone")
    assert await guard.batched_remove([chunk.key]) == 0
    assert guard.contains_now([chunk.key]) == [False]


async def test_a_tier_that_must_be_asked_says_nothing_now(clock: Clock) -> None:
    assert Guard(Moody(), clock=clock).contains_now([make_chunk(1).key]) is None


async def hang_a_put(clock: Clock) -> tuple[Knowing, Guard]:
    inner = Knowing()
    breaker = Guard(inner, GuardOptions(timeout_s=0.05, cool_down_s=1.0), clock=clock)
    assert await breaker.batched_put([make_chunk("known")]) == [True]
    inner.gate = asyncio.Event()
    assert await breaker.batched_put([make_chunk("fresh")]) == [False]
    assert breaker.is_bypassed
    clock.now += 1.01
    return inner, breaker


@pytest.mark.parametrize("names", [[], ["known"]], ids=["no chunks", "known chunks"])
async def test_a_put_that_asks_no_device_does_not_end_the_bypass(
    clock: Clock, names: list[str]
) -> None:
    inner, breaker = await hang_a_put(clock)
    assert await breaker.batched_put([make_chunk(name) for name in names]) == [True] * len(names)
    assert breaker.is_bypassed
    inner.gate = None
    assert await breaker.batched_put([make_chunk("fresh")]) == [True], "the next put is the probe"
    assert not breaker.is_bypassed


@pytest.mark.parametrize("call", ["contains", "get", "put", "remove"])
async def test_a_call_for_no_chunks_is_no_probe(
    breaker: Guard, inner: Moody, clock: Clock, call: str
) -> None:
    await trip(breaker, inner)
    clock.now += 1.01
    inner.error, inner.results = None, []
    num_calls = inner.num_calls
    calls = {
        "contains": lambda: breaker.batched_contains([]),
        "get": lambda: breaker.batched_get([], plain),
        "put": lambda: breaker.batched_put([]),
        "remove": lambda: breaker.batched_remove([]),
    }
    assert not await calls[call]()
    assert breaker.is_bypassed
    assert inner.num_calls == num_calls


@pytest.mark.parametrize("call", ["remove", "clear"])
async def test_a_removal_of_nothing_is_no_success_of_a_device(clock: Clock, call: str) -> None:
    inner = Knowing()
    breaker = Guard(inner, OPTIONS, clock=clock)
    inner.error = UnavailableError("gone")
    for name in range(OPTIONS.num_failures):
        await breaker.batched_put([make_chunk(name)])
    assert breaker.is_bypassed
    clock.now += 1.01
    assert await (breaker.batched_remove(KEYS) if call == "remove" else breaker.clear()) == 0
    assert breaker.is_bypassed


async def test_what_a_hung_put_has_kept_counts_as_kept(clock: Clock) -> None:
    class Partial(Knowing):
        async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
            self.names[chunks[0].key] = chunks[0].num_bytes
            await asyncio.Event().wait()
            raise AssertionError

    breaker = Guard(Partial(), GuardOptions(timeout_s=0.05), clock=clock)
    assert await breaker.batched_put([make_chunk(1), make_chunk(2)]) == [True, False]
    assert breaker.is_bypassed


class Slow(Moody):
    """Takes memory, then waits."""

    def __init__(self) -> None:
        super().__init__()
        self.wait_s = 10.0
        self.is_away = False

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        chunks = [make_chunk(key, allocate=allocate) for key in keys]
        try:
            await self._call()
        except BaseException:
            for chunk in chunks:
                chunk.release()
            raise
        return list(chunks)

    async def _call(self) -> None:
        await asyncio.sleep(self.wait_s)
        if self.is_away:
            raise UnavailableError("away")


class HangingFiles(DiskFiles):
    """Reads wait until they are let go."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, fd: int, buffer: bytearray | memoryview, at: int) -> int:
        self.may_read.wait(30)
        return super().read(fd, buffer, at)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def backend(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setattr(module, "CLEAR_TIMEOUT_S", 0.02)
    monkeypatch.setattr(module, "READ_GRACE_S", 0.0)
    return Guard(slow, options=GuardOptions(num_failures=5, timeout_s=0.02))


async def test_late_calls_are_misses_and_give_their_memory_back(backend: Guard) -> None:
    arena = Arena()
    assert await backend.batched_get(KEYS, arena) == [Miss(MissReason.UNAVAILABLE)] * 2
    assert (
        await backend.batched_get(KEYS, arena, timeout_s=0.01) == [Miss(MissReason.UNAVAILABLE)] * 2
    )
    arena.check_empty()
    assert await backend.batched_contains(KEYS) == [False, False]
    assert await backend.batched_remove(KEYS) == 0
    assert backend.stats()["breaker_open"] == 0
    assert await backend.clear() == 0
    assert backend.stats()["breaker_open"] == 1


async def test_what_is_put_and_removed_adds_to_the_time_by_its_size(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = make_chunk(1)
    slow.wait_s = 0.2
    backend = Guard(slow, options=GuardOptions(timeout_s=0.01))
    monkeypatch.setattr(module, "MIN_BYTES_PER_S", chunk.num_bytes / 10)
    assert await backend.batched_put([chunk]) == [True]
    monkeypatch.setattr(module, "REMOVAL_S", 10)
    assert await backend.batched_remove(KEYS) == 2


async def test_one_put_that_does_not_end_is_enough_and_only_a_put_ends_it(slow: Slow) -> None:
    clock = Clock(0.0)
    backend = Guard(slow, GuardOptions(timeout_s=0.02, cool_down_s=1.0), clock=clock)
    assert await backend.batched_put([make_chunk(1)]) == [False]
    assert backend.stats().items() >= {"breaker_open": 1, "breaker_openings": 1}.items()
    slow.wait_s = 0
    assert await backend.batched_put([make_chunk(1)]) == [False], "not asked"
    clock.now = 1.1
    assert await backend.batched_contains(KEYS) == [True, True], (
        "reads go on, and prove nothing for writes"
    )
    assert backend.is_bypassed
    slow.wait_s = 10.0
    assert await backend.batched_put([make_chunk(1)]) == [False], "a probe that hangs again"
    slow.wait_s = 0
    clock.now = 2.2
    assert await backend.batched_put([make_chunk(1)]) == [False], "after twice the time"
    clock.now = 3.3
    assert await backend.batched_put([make_chunk(1)]) == [True]
    assert not backend.is_bypassed


@pytest.mark.parametrize("how", ["cancelled", "unavailable", "bypassed"])
async def test_a_probe_of_writes_that_tells_nothing_is_followed_by_another(
    slow: Slow, how: str
) -> None:
    """Or writes would be bypassed for good."""
    clock = Clock(0.0)
    backend = Guard(
        slow, GuardOptions(num_failures=2, cool_down_s=1.0, timeout_s=0.05), clock=clock
    )
    assert await backend.batched_put([make_chunk(1)]) == [False]
    clock.now = 5.0
    if how == "cancelled":
        probe = asyncio.create_task(backend.batched_put([make_chunk(1)]))
        await asyncio.sleep(0)
        probe.cancel()
        await asyncio.wait([probe])
    else:
        slow.wait_s, slow.is_away = 0, True
        if how == "bypassed":
            await backend.batched_remove(KEYS)  # the second failure in a row: now nothing passes
        assert await backend.batched_put([make_chunk(1)]) == [False]
    slow.wait_s, slow.is_away = 0, False
    clock.now = 10.0
    assert await backend.batched_put([make_chunk(1)]) == [True]
    assert not backend.is_bypassed


async def test_what_a_tier_answers_from_memory_excuses_no_hung_read(tmp_path: Path) -> None:
    """The index of a disk tier says what is there, however long the disk hangs."""
    files = HangingFiles()
    disk = DiskBackend(tmp_path, 1 << 20, files=files)
    backend = Guard(disk, options=GuardOptions(num_failures=3))
    await backend.open()
    await backend.batched_put([make_chunk(1)])
    files.may_read.clear()
    for _ in range(3):
        assert await backend.batched_contains(KEYS) == [True, False]
        assert await backend.batched_get([make_key("never stored")], Arena()) == [
            Miss(MissReason.NEVER_STORED)
        ]
        assert await backend.batched_get(KEYS[:1], Arena(), timeout_s=0.11) == [
            Miss(MissReason.DEADLINE)
        ]
    assert backend.is_bypassed
    files.may_read.set()
    await backend.close()
