"""The guard of a tier: failures are misses, every call ends, and a tier that keeps failing is
bypassed; what its observers log and count; and a tier whose reads are measured: asked for what it
can bring in time, not asked when that is nothing, and probed again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator, BytesBufferMemoryObj
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage import guard as module
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.guard import (
    MIN_OBSERVATIONS,
    NUM_RECOVERED,
    PROBE_INTERVAL,
    Guard,
    GuardOptions,
    ReadCost,
)
from lmcache_core.storage.observers import MetricsObserver
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, TIER_CHUNKS_TOTAL, Counters

from tests.fixtures.disk_tier import Clock
from tests.fixtures.timed_tier import Timed
from tests.fixtures.wire import Arena
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key
from tests.suites.faults import ForwardingBackend

pytestmark = pytest.mark.virtual_time

KEYS = [make_key(1), make_key(2)]
OPTIONS = GuardOptions(num_failures=3, cool_down_s=1.0, cool_down_cap_s=4.0, slow_call_s=0.5)


def plain(num_bytes: int) -> MemoryObj:
    return BytesBufferMemoryObj(bytearray(num_bytes))


class Moody(StorageBackend):
    """Waits `wait_s` and for `gate`, then raises `error`, or returns `results`: by default all
    chunks, in memory that it takes before.
    """

    name = "Moody"

    def __init__(self, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        self.error: BaseException | None = None
        self.results: list[Result] | None = None
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
        chunks = [make_chunk(key, allocate=allocate) for key in keys]
        try:
            await self._call()
        except BaseException:
            release_all(list(chunks))
            raise
        return list(chunks) if self.results is None else self.results

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
        await asyncio.sleep(self.wait_s)  # real time: virtual
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


async def test_bypassed_tier_is_not_called(breaker: Guard, inner: Moody) -> None:
    await trip(breaker, inner)
    num_calls = inner.num_calls
    assert await breaker.batched_get(KEYS, plain) == [Miss(MissReason.BREAKER_OPEN)] * 2
    assert await breaker.batched_contains(KEYS) == [False, False]
    assert await breaker.batched_put([make_chunk(1)]) == [False]
    assert await breaker.batched_remove(KEYS) == 0
    assert await breaker.clear() == 0
    assert inner.num_calls == num_calls
    assert breaker.stats()["breaker_open"] == 1


async def test_cool_downs_grow_to_their_cap_and_start_over_after_a_success(
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


@pytest.mark.parametrize(
    ("results", "opens"),
    [
        ([Miss(MissReason.NEVER_STORED), Miss(MissReason.DEADLINE)], True),
        ([Miss(MissReason.NEVER_STORED), Miss(MissReason.UNAVAILABLE)], True),
        ([Miss(MissReason.CORRUPT), Miss(MissReason.NEVER_STORED)], False),
        ([make_chunk(1), Miss(MissReason.DEADLINE)], False),
    ],
)
async def test_only_misses_caused_by_the_tier_are_failures(
    breaker: Guard, inner: Moody, results: list[Result], opens: bool
) -> None:
    inner.results = results
    for _ in range(OPTIONS.num_failures):
        assert await breaker.batched_get(KEYS, plain) == results
    assert breaker.is_bypassed is opens


@pytest.mark.parametrize(("lasted_s", "opens"), [(0.4, False), (0.6, True)])
async def test_cancelled_call_is_a_failure_if_it_was_slow(
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


async def test_next_call_is_the_probe_after_a_cancelled_one(
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


async def test_bug_is_raised(breaker: Guard, inner: Moody, clock: Clock) -> None:
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


async def test_each_change_is_logged_once(
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
    """Knows what it holds, so that it answers without its device wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[ChunkKey] = set()
        self.num_stored = 0

    @property
    def num_written(self) -> int:
        return self.num_stored

    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key in self.names for key in keys]

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.contains_now(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        if not any(self.contains_now(keys)):
            return [Miss(MissReason.NEVER_STORED)] * len(keys)
        return await super().batched_get(keys, allocate, timeout_s)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        if any(chunk.key not in self.names for chunk in chunks):
            await self._call()
            self.names |= {chunk.key for chunk in chunks}
            self.num_stored += 1
        return [True] * len(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        known = [key for key in keys if key in self.names]
        if known:
            await self._call()
        self.names.difference_update(known)
        return len(known)

    async def clear(self, tenant: str | None = None) -> int:
        return await self.batched_remove(list(self.names))


async def test_bypassed_tier_holds_nothing_now(clock: Clock) -> None:
    inner = Knowing()
    guard = Guard(inner, GuardOptions(num_failures=1), clock=clock)
    chunk = make_chunk("known")
    assert await guard.batched_put([chunk]) == [True]
    assert guard.contains_now([chunk.key, make_chunk("other").key]) == [True, False]
    inner.error = UnavailableError("gone")
    assert await guard.batched_remove([chunk.key]) == 0
    assert guard.contains_now([chunk.key]) == [False]


async def hang_a_put(clock: Clock) -> tuple[Knowing, Guard]:
    inner = Knowing()
    breaker = Guard(inner, GuardOptions(cool_down_s=1.0), clock=clock)
    assert await breaker.batched_put([make_chunk("known")]) == [True]
    inner.gate = asyncio.Event()
    assert await breaker.batched_put([make_chunk("fresh")]) == [False]
    assert breaker.is_bypassed
    clock.now += 1.01
    return inner, breaker


@pytest.mark.parametrize("call", ["put nothing", "put known chunks", "remove unknown", "clear"])
async def test_call_that_needs_no_device_does_not_end_the_bypass(clock: Clock, call: str) -> None:
    inner, breaker = await hang_a_put(clock)
    if call == "remove unknown":
        assert await breaker.batched_remove(KEYS) == 0
    elif call == "clear":
        inner.names.clear()
        assert await breaker.clear() == 0
    else:
        chunks = [make_chunk("known")] if call == "put known chunks" else []
        assert await breaker.batched_put(chunks) == [True] * len(chunks)
    assert breaker.is_bypassed
    inner.gate = None
    assert await breaker.batched_put([make_chunk("fresh")]) == [True], "the next put is the probe"
    assert not breaker.is_bypassed


async def test_late_calls_are_misses_and_release_their_memory() -> None:
    arena, late = Arena(), [Miss(MissReason.UNAVAILABLE)] * 2
    backend = Guard(Moody(wait_s=1e6))
    assert await backend.batched_get(KEYS, arena) == late
    assert await backend.batched_get(KEYS, arena, timeout_s=0.01) == late
    arena.check_empty()
    assert await backend.batched_contains(KEYS) == [False, False]
    assert await backend.batched_remove(KEYS) == 0
    assert backend.stats()["breaker_open"] == 0
    assert await backend.clear() == 0
    assert backend.stats()["breaker_open"] == 1


async def test_deadlines_of_puts_and_removals_grow_with_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk, options = make_chunk(1), GuardOptions(timeout_s=1.0)
    assert await Guard(Moody(wait_s=8.0), options).batched_put([chunk]) == [False]
    assert await Guard(Moody(wait_s=8.0), options).batched_remove(KEYS) == 0
    monkeypatch.setattr(module, "MIN_BYTES_PER_S", chunk.num_bytes / 10)
    assert await Guard(Moody(wait_s=8.0), options).batched_put([chunk]) == [True]
    monkeypatch.setattr(module, "REMOVAL_S", 10)
    assert await Guard(Moody(wait_s=8.0), options).batched_remove(KEYS) == 2


async def test_one_hung_put_bypasses_writes_until_a_put_succeeds(clock: Clock) -> None:
    slow = Moody(wait_s=100.0)
    backend = Guard(slow, GuardOptions(cool_down_s=1.0), clock=clock)
    assert await backend.batched_put([make_chunk(1)]) == [False]
    assert backend.stats().items() >= {"breaker_open": 1, "breaker_openings": 1}.items()
    slow.wait_s = 0
    assert await backend.batched_put([make_chunk(1)]) == [False], "not asked"
    clock.now = 1.1
    assert await backend.batched_contains(KEYS) == [True, True], (
        "reads continue and prove nothing about writes"
    )
    assert backend.is_bypassed
    slow.wait_s = 100.0
    assert await backend.batched_put([make_chunk(1)]) == [False], "a probe that hangs again"
    slow.wait_s = 0
    clock.now = 2.2
    assert await backend.batched_put([make_chunk(1)]) == [False], "after twice the time"
    clock.now = 3.3
    assert await backend.batched_put([make_chunk(1)]) == [True]
    assert not backend.is_bypassed


@pytest.mark.parametrize("how", ["cancelled", "unavailable", "bypassed"])
async def test_inconclusive_probe_of_writes_is_followed_by_another(clock: Clock, how: str) -> None:
    """Or writes would be bypassed for good."""
    slow = Moody(wait_s=100.0)
    backend = Guard(slow, GuardOptions(num_failures=2, cool_down_s=1.0), clock=clock)
    assert await backend.batched_put([make_chunk(1)]) == [False]
    clock.now = 5.0
    if how == "cancelled":
        probe = asyncio.create_task(backend.batched_put([make_chunk(1)]))
        await asyncio.sleep(0)
        probe.cancel()
        await asyncio.wait([probe])
    else:
        slow.wait_s, slow.error = 0, UnavailableError("away")
        if how == "bypassed":
            await backend.batched_remove(KEYS)  # the second consecutive failure
        assert await backend.batched_put([make_chunk(1)]) == [False]
    slow.wait_s, slow.error = 0, None
    clock.now = 10.0
    assert await backend.batched_put([make_chunk(1)]) == [True]
    assert not backend.is_bypassed


async def test_answers_from_memory_do_not_excuse_hung_reads() -> None:
    """A tier that knows its chunks says what it holds, however long its device hangs."""
    inner = Knowing()
    backend = Guard(inner, options=GuardOptions(num_failures=3))
    await backend.batched_put([make_chunk(1)])
    inner.gate = asyncio.Event()
    for _ in range(3):
        assert await backend.batched_contains(KEYS) == [True, False]
        assert await backend.batched_get([make_key("never stored")], plain) == [
            Miss(MissReason.NEVER_STORED)
        ]
        assert await backend.batched_get(KEYS[:1], plain, timeout_s=0.11) == [
            Miss(MissReason.UNAVAILABLE)
        ]
    assert backend.is_bypassed


async def test_only_failures_in_a_row_count(breaker: Guard, inner: Moody) -> None:
    for _ in range(10):
        inner.error = UnavailableError("gone")
        for _ in range(OPTIONS.num_failures - 1):
            await breaker.batched_contains(KEYS)
        inner.error = None
        await breaker.batched_contains(KEYS)
    assert not breaker.is_bypassed


RECORD_BYTES = 512 + 1000


@pytest.fixture
def memory() -> LocalCPUBackend:
    return LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy())


class Away(ForwardingBackend):
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        raise UnavailableError("away")


async def test_each_call_is_one_log_line_that_reveals_only_the_hash_of_a_key(
    memory: LocalCPUBackend, caplog: pytest.LogCaptureFixture
) -> None:
    tier, key = Guard(memory), make_key("a", tenant="acme")
    with caplog.at_level(logging.DEBUG):
        await tier.batched_put([make_chunk("a", tenant="acme"), make_chunk("b")])
        await tier.batched_contains([key, make_key("never")])
        [got, _] = await tier.batched_get([key, make_key("never")], Arena())
        await tier.batched_remove([key])
        await tier.clear()
        await Guard(Away(memory)).batched_contains([key])
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


async def test_calls_are_counted_by_operation_and_misses_by_reason(memory: LocalCPUBackend) -> None:
    counters, arena = Counters(), Arena()
    tier = Guard(memory, observers=[MetricsObserver(counters)])
    await tier.batched_put([make_chunk(i) for i in range(3)])
    await tier.batched_contains([make_key(i) for i in range(5)])
    for result in await tier.batched_get([make_key(i) for i in range(1, 5)], arena):
        payload_of(result)
    await tier.batched_remove([make_key(0)])
    await tier.clear()
    figures = tier.stats()
    counted = {name: value for name, value in figures.items() if name not in memory.stats()}
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


LIMIT_S = 0.1


@pytest.fixture
def tier() -> Timed:
    return Timed()


@pytest.fixture
def priced(tier: Timed) -> Guard:
    """Without a breaker that opens."""
    return Guard(tier, GuardOptions(num_failures=1 << 20), is_priced=True, clock=tier.clock)


async def read(priced: Guard, num: int, times: int = 1, limit_s: float | None = None) -> None:
    for _ in range(times):
        await priced.batched_get([make_key(i) for i in range(num)], plain, limit_s)


async def learn(priced: Guard) -> None:
    """Make enough reads for latency and bandwidth to be known."""
    for num in (1, 4, 2, 8, 1, 4, 2, 8):
        await read(priced, num)


async def test_expensive_tier_is_probed_periodically(priced: Guard, tier: Timed) -> None:
    tier.latency_s = 1.0
    await learn(priced)
    answers = [priced.num_worth(3, LIMIT_S) for _ in range(3 * PROBE_INTERVAL)]
    assert answers == ([0] * (PROBE_INTERVAL - 1) + [3]) * 3
    assert priced.stats()["reads_too_dear"] == 3 * PROBE_INTERVAL


async def test_probe_that_finds_nothing_is_followed_by_another(priced: Guard, tier: Timed) -> None:
    tier.latency_s = 1.0
    await learn(priced)
    tier.is_empty = True
    assert [priced.num_worth(3, LIMIT_S) for _ in range(PROBE_INTERVAL)][-1] == 3
    for _ in range(3):
        await read(priced, 3)
        assert priced.num_worth(3, LIMIT_S) == 3, "nothing is known of its price"
    tier.is_empty = False
    await read(priced, 3)
    assert priced.num_worth(3, LIMIT_S) == 0
    await read(priced, 3)
    assert priced.num_worth(3, LIMIT_S) == 0


async def test_bypassed_tier_is_probed_whatever_its_cost(tier: Timed) -> None:
    options = GuardOptions(num_failures=MIN_OBSERVATIONS + 2, cool_down_s=1.0)
    priced = Guard(tier, options, is_priced=True, clock=tier.clock)
    tier.latency_s = 1.0
    for _ in range(options.num_failures):
        await read(priced, 3, limit_s=LIMIT_S)
    assert priced.is_bypassed
    tier.latency_s = 0.001
    tier.now += options.cool_down_s
    assert priced.num_worth(3, LIMIT_S / 2) == 3, "only a read can show that the tier answers again"
    await read(priced, 3, limit_s=LIMIT_S)
    assert not priced.is_bypassed


async def test_two_probes_show_that_a_tier_has_recovered(priced: Guard, tier: Timed) -> None:
    tier.latency_s = 2.0
    await read(priced, 4, 40)
    assert priced.num_worth(4, LIMIT_S) == 0
    tier.latency_s = 0.001
    await read(priced, 4)
    assert priced.num_worth(4, LIMIT_S) == 0, "one may be luck"
    await read(priced, 4)
    assert priced.num_worth(4, LIMIT_S) == 4
    await read(priced, 4, MIN_OBSERVATIONS)
    assert priced.num_worth(4, LIMIT_S) == 4


async def test_late_reads_count(priced: Guard, tier: Timed) -> None:
    tier.latency_s = 5.0
    await read(priced, 4, MIN_OBSERVATIONS, LIMIT_S)  # ends at the limit, with nothing
    assert priced.num_worth(4, LIMIT_S * 0.99) == 0


@pytest.mark.parametrize(
    ("limit_s", "elapsed_s", "num_worth"),
    [(LIMIT_S, 1.5 * LIMIT_S, 0), (LIMIT_S, LIMIT_S / 2, 4), (None, LIMIT_S / 2, 4)],
)
async def test_cancelled_reads_count_only_past_their_limit(
    priced: Guard, tier: Timed, limit_s: float | None, elapsed_s: float, num_worth: int
) -> None:
    tier.hangs = True
    for _ in range(MIN_OBSERVATIONS):
        reading = asyncio.create_task(read(priced, 4, limit_s=limit_s))
        await asyncio.sleep(0)
        tier.now += elapsed_s
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert priced.num_worth(4, LIMIT_S if num_worth == 0 else 1e-9) == num_worth


@pytest.mark.parametrize(
    "answer", [None, MissReason.NEVER_STORED, MissReason.BREAKER_OPEN, MissReason.UNAVAILABLE]
)
async def test_misses_and_errors_say_nothing_about_the_price(
    priced: Guard, tier: Timed, monkeypatch: pytest.MonkeyPatch, answer: MissReason | None
) -> None:
    async def refuse(keys: Sequence[ChunkKey], *_: object) -> list[Result]:
        if answer is None:
            raise UnavailableError("away")
        return [Miss(answer)] * len(keys)

    monkeypatch.setattr(tier, "batched_get", refuse)
    await read(priced, 4, 3 * MIN_OBSERVATIONS)
    assert priced.num_worth(4, 1e-9) == 4


CHUNK_BYTES = 1_000_000


def test_expectation_is_never_negative_and_never_falls_with_size() -> None:
    rng = random.Random(2)
    for _ in range(50):
        cost = ReadCost()
        for _ in range(rng.randint(MIN_OBSERVATIONS, 30)):
            num = rng.choice([0, 0, 1, 2, 50])
            cost.observe(num, num * CHUNK_BYTES, rng.choice([0.0, 1e-6, 0.01, 5.0]))
        expected = [cost.expected_s(num) for num in (1, 2, 10, 1000)]
        known = [seconds for seconds in expected if seconds is not None]
        assert known == sorted(known)
        assert all(seconds >= 0 for seconds in known)


async def test_read_slower_than_computing_is_worth_nothing_whatever_the_limit(
    priced: Guard, tier: Timed
) -> None:
    tier.s_per_chunk = 0.01
    await learn(priced)
    assert priced.num_worth(5, 10.0, recompute_s=0.005) == 0
    assert priced.num_worth(5, 10.0, recompute_s=0.02) == 5
    assert priced.num_worth(500, LIMIT_S, recompute_s=0.005) == 0, (
        "nor is the part of it that would fit"
    )


async def test_answer_to_another_read_does_not_answer_a_probe(priced: Guard, tier: Timed) -> None:
    tier.latency_s = 1.0
    await learn(priced)
    assert [priced.num_worth(3, LIMIT_S) for _ in range(PROBE_INTERVAL)][-1] == 3
    await asyncio.create_task(read(priced, 2))  # underway when the probe began, and ended first
    tier.is_empty = True
    await read(priced, 3)
    assert priced.num_worth(3, LIMIT_S) == 3, "the probe has learned no price"


def test_reads_of_one_size_are_never_considered_free() -> None:
    """Latency and bandwidth are unknown: less costs as much, more costs in proportion."""
    cost = ReadCost()
    for _ in range(10):
        cost.observe(4, 4 * CHUNK_BYTES, 0.008)
    assert cost.expected_s(1) == cost.expected_s(4) == pytest.approx(0.008)
    assert cost.expected_s(40) == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("num_chunks", "later_s"),
    [(0, [0.001]), (2, [1.0]), (2, [0.001, 2.0])],
    ids=["without a chunk", "not much cheaper", "not in a row"],
)
def test_some_cheaper_reads_are_no_recovery(num_chunks: int, later_s: list[float]) -> None:
    cost = ReadCost()
    for read_s in [2.0] * 30 + later_s * NUM_RECOVERED:
        cost.observe(num_chunks, num_chunks * CHUNK_BYTES, read_s)
    assert cost.expected_s(2) is not None
