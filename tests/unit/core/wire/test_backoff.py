"""Waiting before the next try."""

from __future__ import annotations

from lmcache_core.wire.backoff import Backoff


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_doubles_up_to_its_cap_and_begins_anew() -> None:
    backoff = Backoff(0.1, 1.0, Clock(), jitter=lambda: 1.0)
    waits: list[float] = []
    for _ in range(6):
        assert backoff.wait_s == 0 or waits
        backoff.failed()
        waits.append(round(backoff.wait_s, 6))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.succeeded()
    assert backoff.wait_s == 0
    backoff.failed()
    assert round(backoff.wait_s, 6) == 0.1


def test_jitter_takes_up_to_half_away() -> None:
    backoff = Backoff(1.0, 10.0, Clock(), jitter=lambda: 0.0)
    backoff.failed()
    assert backoff.wait_s == 0.5


def test_time_passes() -> None:
    clock = Clock()
    backoff = Backoff(1.0, 10.0, clock, jitter=lambda: 1.0)
    backoff.failed()
    clock.now += 0.75
    assert backoff.wait_s == 0.25
    clock.now += 1
    assert backoff.wait_s == 0


def test_many_failures_do_not_overflow() -> None:
    backoff = Backoff(1.0, 10.0, Clock(), jitter=lambda: 1.0)
    for _ in range(5000):
        backoff.failed()
    assert backoff.wait_s == 10.0
