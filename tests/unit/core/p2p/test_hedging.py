from lmcache_core.p2p.pull import (
    MAX_HEDGES_SAVED,
    MIN_HEDGE_S,
    MIN_SAMPLES,
    UNKNOWN_SHARE,
    Hedging,
)


def test_a_pull_is_late_past_the_p95_of_pulls_of_its_size() -> None:
    times = Hedging()
    for i in range(100):
        times.observe(16, i / 100)  # the last 64 count: 0.36 to 0.99
        times.observe(1, 5.0)
    assert times.hedge_s(16, 100.0) == 0.96
    assert times.hedge_s(31, 100.0) == 0.96, "the same size class"
    assert times.hedge_s(1, 100.0) == 5.0


def test_while_little_is_known_it_is_late_after_a_share_of_the_time() -> None:
    times = Hedging()
    for _ in range(MIN_SAMPLES - 1):
        times.observe(4, 0.5)
    assert times.hedge_s(4, 2.0) == 2.0 * UNKNOWN_SHARE
    times.observe(4, 0.5)
    assert times.hedge_s(4, 2.0) == 0.5


def test_nothing_is_late_at_once() -> None:
    times = Hedging()
    for _ in range(MIN_SAMPLES):
        times.observe(1, 0.0)
    assert times.hedge_s(1, 1.0) == MIN_HEDGE_S
    assert times.hedge_s(1 << 40, 0.0) == MIN_HEDGE_S


def test_one_pull_in_ten_may_be_doubled_and_a_few_at_once() -> None:
    budget = Hedging()
    assert sum(budget.spend() for _ in range(100)) == MAX_HEDGES_SAVED
    num_doubled = 0
    for _ in range(200):
        budget.earn()
        num_doubled += budget.spend()
    assert 19 <= num_doubled <= 20
