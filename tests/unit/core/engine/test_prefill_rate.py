"""How fast the serving engine computes: configured, told, or learned from its calls."""

from __future__ import annotations

import threading

import pytest
from lmcache_core.engine.prefill_rate import (
    FALL,
    MAX_OPEN_PREFILLS,
    MAX_PREFILL_S,
    MIN_PREFILL_S,
    RISE,
    PrefillRate,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rate(clock: Clock) -> PrefillRate:
    return PrefillRate(clock=clock)


def test_between_the_miss_and_the_store_the_engine_computes(
    rate: PrefillRate, clock: Clock
) -> None:
    rate.missed("k")
    clock.now += 0.5
    rate.stored("k", 1000)
    assert rate.tokens_per_s == pytest.approx(2000)
    assert rate.recompute_s(256) == pytest.approx(0.128)


def test_a_store_that_no_miss_preceded_says_nothing(rate: PrefillRate, clock: Clock) -> None:
    rate.missed("k")
    clock.now += 0.5
    rate.stored("other", 1000)
    assert rate.tokens_per_s is None
    rate.stored("k", 1000)
    known = rate.tokens_per_s
    clock.now += 7.0
    rate.stored("k", 1000)
    assert rate.tokens_per_s == known, "a miss counts once"


def test_the_last_miss_of_a_chunk_counts(rate: PrefillRate, clock: Clock) -> None:
    """The first request may have been aborted."""
    rate.missed("k")
    clock.now += 30.0
    rate.missed("k")
    clock.now += 0.1
    rate.stored("k", 100)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_what_was_configured_is_not_learned_over(clock: Clock) -> None:
    rate = PrefillRate(5000.0, clock)
    rate.note(100, 1.0)
    assert rate.tokens_per_s == 5000.0
    assert rate.recompute_s(250) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("num_tokens", "elapsed_s"),
    [
        (0, 1.0),
        (-5, 1.0),
        (100, 0.0),
        (100, -1.0),
        (100, MIN_PREFILL_S / 2),
        (100, MAX_PREFILL_S + 1),
    ],
)
def test_what_cannot_be_a_prefill_is_not_believed(
    rate: PrefillRate, num_tokens: int, elapsed_s: float
) -> None:
    rate.note(num_tokens, elapsed_s)
    assert rate.tokens_per_s is None


def test_faster_is_believed_sooner_than_slower(rate: PrefillRate) -> None:
    rate.note(1000, 1.0)
    rate.note(3000, 1.0)
    assert rate.tokens_per_s == pytest.approx(1000 + RISE * 2000)
    before = rate.tokens_per_s
    rate.note(100, 1.0)
    assert rate.tokens_per_s == pytest.approx(before + FALL * (100 - before))


def test_queueing_now_and_then_hardly_changes_it_and_a_slower_engine_is_believed_in_the_end(
    rate: PrefillRate,
) -> None:
    for turn in range(100):
        rate.note(1000, 5.0 if turn % 5 == 4 else 1.0)
    assert rate.tokens_per_s is not None
    assert 800 < rate.tokens_per_s <= 1000
    for _ in range(200):
        rate.note(1000, 10.0)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.01)


def test_misses_that_nobody_answers_are_forgotten(rate: PrefillRate, clock: Clock) -> None:
    for number in range(MAX_OPEN_PREFILLS + 1):
        rate.missed(number)
    clock.now += 1.0
    rate.stored(0, 100)
    assert rate.tokens_per_s is None, "the oldest went"
    rate.stored(1, 100)
    assert rate.tokens_per_s == pytest.approx(100)


def test_threads_may_use_it_at_once() -> None:
    rate = PrefillRate()

    def work(name: int) -> None:
        for number in range(300):
            rate.missed((name, number))
            rate.stored((name, number), 10)
            rate.note(1000, 0.5)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rate.tokens_per_s is not None
    assert rate.tokens_per_s >= 1900
    assert not rate._open
