import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.security import RateLimiter
from lmcache_core.security.tokens import MAX_BUCKETS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_second_has_that_many_requests_and_the_rest_is_told_when() -> None:
    clock = Clock()
    limiter = RateLimiter(4.0, clock)
    assert [limiter.wait_s("a") for _ in range(4)] == [0.0] * 4
    assert limiter.wait_s("a") == pytest.approx(0.25)
    assert limiter.wait_s("a") == pytest.approx(0.25), "to be refused costs nothing"
    assert limiter.wait_s("b") == 0.0, "callers do not pay for one another"
    clock.now += 0.25
    assert limiter.wait_s("a") == 0.0
    assert limiter.wait_s("a") > 0
    clock.now += 1000
    assert [limiter.wait_s("a") > 0 for _ in range(5)] == [False] * 4 + [True], "nobody saves up"


def test_less_than_one_a_second_is_still_one_at_first() -> None:
    clock = Clock()
    limiter = RateLimiter(0.1, clock)
    assert limiter.wait_s("a") == 0.0
    assert limiter.wait_s("a") == pytest.approx(10.0)
    clock.now += 10.0
    assert limiter.wait_s("a") == 0.0


def test_the_table_is_bounded_and_forgets_who_has_been_away_longest() -> None:
    clock = Clock()
    limiter = RateLimiter(1.0, clock)
    for number in range(MAX_BUCKETS):
        assert limiter.wait_s(str(number)) == 0.0
    assert limiter.wait_s("0") > 0, "known, and now the latest"
    assert limiter.wait_s("new") == 0.0
    assert limiter.wait_s("0") > 0
    assert limiter.wait_s("1") == 0.0, "was forgotten"
    assert len(limiter._buckets) == MAX_BUCKETS


@given(st.lists(st.floats(0, 0.5), max_size=200), st.floats(0.5, 50))
def test_no_span_of_time_has_more_than_its_share(pauses: list[float], per_second: float) -> None:
    clock = Clock()
    limiter = RateLimiter(per_second, clock)
    served: list[float] = []
    for pause in pauses:
        clock.now += pause
        if not limiter.wait_s("a"):
            served.append(clock.now)
    for begin in range(len(served)):
        for end in range(begin, len(served)):
            assert (
                end - begin + 1
                <= max(per_second, 1.0) + (served[end] - served[begin]) * per_second + 1e-6
            )
