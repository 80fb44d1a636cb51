"""A tier whose reads are measured: asked for what it can bring in time, not asked when that is
nothing, and probed again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.record import Miss, MissReason, Result
from lmcache_core.storage.guard import (
    MIN_OBSERVATIONS,
    NUM_RECOVERED,
    PROBE_INTERVAL,
    Guard,
    GuardOptions,
    ReadCost,
)

from tests.fixtures.timed_tier import Timed
from tests.suites.chunks import make_key

LIMIT_S = 0.1


@pytest.fixture
def tier() -> Timed:
    return Timed()


@pytest.fixture
def priced(tier: Timed) -> Guard:
    """Without a breaker that opens."""
    return Guard(tier, GuardOptions(num_failures=1 << 20), is_priced=True, clock=tier.clock)


def plain(num_bytes: int) -> BytesBufferMemoryObj:
    return BytesBufferMemoryObj(bytearray(num_bytes))


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
