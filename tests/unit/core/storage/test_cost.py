"""The expected cost of a read, learned from earlier reads."""

from __future__ import annotations

import random

import pytest
from lmcache_core.storage.guard import MIN_OBSERVATIONS, RECOVERED_FACTOR, ReadCost

CHUNK = 1_000_000
LATENCY_S, S_PER_CHUNK = 0.004, 0.001


def observe(
    cost: ReadCost, *sizes: int, latency_s: float = LATENCY_S, s_per_chunk: float = S_PER_CHUNK
) -> None:
    for num in sizes:
        cost.observe(num, num * CHUNK, latency_s + num * s_per_chunk)


def test_latency_and_bandwidth_are_distinguished() -> None:
    cost = ReadCost()
    observe(cost, 1, 8, 2, 16, 4, 1, 8)
    for num in (1, 5, 100):
        assert cost.expected_s(num) == pytest.approx(LATENCY_S + num * S_PER_CHUNK)


def test_reads_of_one_size_are_never_considered_free() -> None:
    """Latency and bandwidth are unknown: less costs as much, more costs in proportion."""
    cost = ReadCost()
    observe(cost, *[4] * 10)
    seen_s = LATENCY_S + 4 * S_PER_CHUNK
    assert cost.expected_s(1) == cost.expected_s(4) == pytest.approx(seen_s)
    assert cost.expected_s(40) == pytest.approx(10 * seen_s)


def test_expectation_is_never_negative_and_never_falls_with_size() -> None:
    rng = random.Random(2)
    for _ in range(50):
        cost = ReadCost()
        for _ in range(rng.randint(MIN_OBSERVATIONS, 30)):
            num = rng.choice([0, 0, 1, 2, 50])
            cost.observe(num, num * CHUNK, rng.choice([0.0, 1e-6, 0.01, 5.0]))
        expected = [cost.expected_s(num) for num in (1, 2, 10, 1000)]
        known = [seconds for seconds in expected if seconds is not None]
        assert known == sorted(known)
        assert all(seconds >= 0 for seconds in known)


def test_recent_reads_count_most() -> None:
    cost = ReadCost()
    observe(cost, *[1, 2, 4] * 10)
    observe(cost, *[1, 2, 4] * 10, latency_s=0.05, s_per_chunk=0.02)
    assert cost.expected_s(4) == pytest.approx(0.05 + 4 * 0.02, rel=0.2)


def test_quick_read_without_a_chunk_is_no_recovery() -> None:
    cost = ReadCost()
    for _ in range(30):
        cost.observe(0, 0, 2.0)
    cost.observe(0, 0, 0.001)
    assert cost.expected_s(1) is not None


def test_somewhat_cheaper_read_is_no_recovery() -> None:
    cost = ReadCost()
    observe(cost, *[1, 2, 4] * 10)
    cost.observe(2, 2 * CHUNK, (LATENCY_S + 2 * S_PER_CHUNK) / (RECOVERED_FACTOR - 1))
    assert cost.expected_s(2) is not None


@pytest.mark.parametrize("limit_s", [0.0, LATENCY_S, 0.0051, 0.0071, 0.0541, 10.0])
def test_number_of_chunks_within_a_limit(limit_s: float) -> None:
    cost = ReadCost()
    observe(cost, 1, 8, 2, 16, 4, 1, 8)
    within = [num for num in range(1, 65) if (cost.expected_s(num) or 0.0) <= limit_s]
    assert cost.num_within(64, limit_s) == len(within)
    assert cost.num_within(0, limit_s) == 0
