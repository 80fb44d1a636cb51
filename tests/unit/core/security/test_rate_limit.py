import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.security import RateLimiter
from lmcache_core.security.tokens import MAX_BUCKETS

from tests.fixtures.held_clock import HeldClock


def test_caller_has_so_many_requests_a_second_and_learns_how_long_to_wait() -> None:
    clock = HeldClock()
    limiter = RateLimiter(4.0, clock)
    assert [limiter.wait_s("a") for _ in range(4)] == [0.0] * 4
    assert limiter.wait_s("a") == pytest.approx(0.25)
    assert limiter.wait_s("a") == pytest.approx(0.25), "a refusal costs nothing"
    assert limiter.wait_s("b") == 0.0, "callers do not pay for one another"
    clock.now_s += 0.25
    assert limiter.wait_s("a") == 0.0
    assert limiter.wait_s("a") > 0
    clock.now_s += 1000
    assert [limiter.wait_s("a") > 0 for _ in range(5)] == [False] * 4 + [True]


def test_less_than_one_request_a_second_is_still_one_at_first() -> None:
    clock = HeldClock()
    limiter = RateLimiter(0.1, clock)
    assert limiter.wait_s("a") == 0.0
    assert limiter.wait_s("a") == pytest.approx(10.0)


def test_caller_that_was_idle_longest_is_forgotten() -> None:
    limiter = RateLimiter(1.0, HeldClock())
    for number in range(MAX_BUCKETS):
        assert limiter.wait_s(str(number)) == 0.0
    assert limiter.wait_s("0") > 0
    assert limiter.wait_s("new") == 0.0
    assert limiter.wait_s("0") > 0, "it has been asked about since"
    assert limiter.wait_s("1") == 0.0, "it was forgotten"


@given(st.lists(st.floats(0, 0.5), max_size=200), st.floats(0.5, 50))
def test_no_span_of_time_has_more_than_its_share(pauses: list[float], per_second: float) -> None:
    clock = HeldClock()
    limiter = RateLimiter(per_second, clock)
    served: list[float] = []
    for pause in pauses:
        clock.now_s += pause
        if not limiter.wait_s("a"):
            served.append(clock.now_s)
    for begin in range(len(served)):
        for end in range(begin, len(served)):
            share = max(per_second, 1.0) + (served[end] - served[begin]) * per_second
            assert end - begin + 1 <= share + 1e-6
