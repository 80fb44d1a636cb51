"""How fast the serving engine computes, as learned from its calls."""

from __future__ import annotations

import pytest
from lmcache_core.engine.prefill_rate import (
    FALL,
    MAX_OPEN_PREFILLS,
    MAX_PREFILL_S,
    MIN_PREFILL_S,
    MIN_PREFILL_TOKENS,
    RISE,
    PrefillRate,
)

from tests.fixtures.held_clock import HeldClock


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def rate(clock: HeldClock) -> PrefillRate:
    return PrefillRate(clock=clock)


def test_the_last_miss_of_a_chunk_counts(rate: PrefillRate, clock: HeldClock) -> None:
    """The first request may have been aborted."""
    rate.missed("k")
    clock.now_s += 30.0
    rate.missed("k")
    clock.now_s += 0.1
    rate.stored("k", 100)
    assert rate.tokens_per_s == pytest.approx(1000)


@pytest.mark.parametrize(
    ("num_tokens", "elapsed_s"),
    [
        (MIN_PREFILL_TOKENS - 1, 1.0),
        (100, -1.0),
        (100, MIN_PREFILL_S / 2),
        (100, MAX_PREFILL_S + 1),
    ],
)
def test_impossible_measurements_are_ignored(
    rate: PrefillRate, num_tokens: int, elapsed_s: float
) -> None:
    rate.note(num_tokens, elapsed_s)
    assert rate.tokens_per_s is None


def test_a_faster_rate_is_adopted_sooner_than_a_slower_one(rate: PrefillRate) -> None:
    rate.note(1000, 1.0)
    rate.note(3000, 1.0)
    assert rate.tokens_per_s == pytest.approx(1000 + RISE * 2000)
    before = rate.tokens_per_s
    rate.note(100, 1.0)
    assert rate.tokens_per_s == pytest.approx(before + FALL * (100 - before))


def test_misses_without_a_store_are_bounded(rate: PrefillRate, clock: HeldClock) -> None:
    for number in range(MAX_OPEN_PREFILLS + 1):
        rate.missed(number)
    clock.now_s += 1.0
    rate.stored(0, 100)
    assert rate.tokens_per_s is None, "the oldest went"
    rate.stored(1, 100)
    assert rate.tokens_per_s == pytest.approx(100)


def test_only_a_store_after_a_miss_is_measured(rate: PrefillRate, clock: HeldClock) -> None:
    rate.missed("k")
    clock.now_s += 0.5
    rate.stored("other", 1000)
    assert rate.tokens_per_s is None
    rate.stored("k", 1000)
    known = rate.tokens_per_s
    clock.now_s += 7.0
    rate.stored("k", 1000)
    assert rate.tokens_per_s == known, "a miss counts once"
