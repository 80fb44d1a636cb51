"""Waiting before the next try."""

from __future__ import annotations

from lmcache_core.wire.backoff import Backoff

from tests.fixtures.held_clock import HeldClock


def test_wait_doubles_up_to_its_cap_and_starts_over_after_a_success() -> None:
    backoff = Backoff(0.1, 1.0, HeldClock(), jitter=lambda: 1.0)
    assert backoff.wait_s == 0
    waits: list[float] = []
    for _ in range(6):
        backoff.failed()
        waits.append(round(backoff.wait_s, 6))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for _ in range(5000):  # without an overflow
        backoff.failed()
    backoff.succeeded()
    assert backoff.wait_s == 0
    backoff.failed()
    assert round(backoff.wait_s, 6) == 0.1


def test_jitter_takes_up_to_half_of_a_wait_away() -> None:
    backoff = Backoff(1.0, 10.0, HeldClock(), jitter=lambda: 0.0)
    backoff.failed()
    assert backoff.wait_s == 0.5


def test_wait_passes_with_time() -> None:
    clock = HeldClock()
    backoff = Backoff(1.0, 10.0, clock, jitter=lambda: 1.0)
    backoff.failed()
    clock.now_s += 0.75
    assert backoff.wait_s == 0.25
    clock.now_s += 1
    assert backoff.wait_s == 0
