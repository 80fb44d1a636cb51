"""Age and quotas: the parts, without a tier."""

from __future__ import annotations

import pytest
from lmcache_core.errors import ConfigError, IntegrityError
from lmcache_core.storage.eviction import Ledger, TenantQuotas, TierLimits, create_policy

from tests.fixtures.disk_tier import Clock
from tests.suites.chunks import make_key

A, B, C = make_key("a"), make_key("b"), make_key("c")
MINE, YOURS = make_key("a", "mine"), make_key("a", "yours")


@pytest.fixture
def clock():
    return Clock(1000.0)


def test_chunks_end_in_the_order_in_which_they_were_stored(clock):
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    for key in (A, B, C):
        ledger.add(key, 10)
        clock.now += 2
    assert ledger.past(5) == []
    clock.now = 1012
    assert ledger.past(5) == [A, B]
    assert ledger.past(1) == [A]
    assert [ledger.is_live(key) for key in (A, B, C)] == [False, False, True]
    ledger.remove(A, 10)
    assert ledger.past(5) == [B]
    ledger.check_integrity({B: 10, C: 10})


def test_the_last_moment_is_the_first_one_too_late(clock):
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    ledger.add(A, 10)
    clock.now = 1009.9
    assert ledger.is_live(A)
    clock.now = 1010
    assert not ledger.is_live(A)


def test_a_chunk_brings_its_age_with_it_but_none_comes_from_the_future(clock):
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    ledger.add(A, 10, 995)
    ledger.add(B, 10, 2000)
    clock.now = 1006
    assert [ledger.is_live(key) for key in (A, B)] == [False, True]
    clock.now = 1010
    assert not ledger.is_live(B)


def test_what_was_stored_while_the_clock_was_ahead_lives_no_longer_than_the_rest(clock):
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    clock.now = 4600
    ledger.add(A, 10)
    ledger.add(B, 10)
    clock.now = 1000
    assert all(ledger.is_live(key) for key in (A, B))
    assert ledger.past(5) == []
    ledger.add(C, 10)
    clock.now = 1009.9
    assert ledger.is_live(A)
    clock.now = 1010
    assert not ledger.is_live(A), "its time began when it was next looked at"
    assert ledger.past(5) == [A, B, C]


def test_an_old_chunk_behind_younger_ones_is_not_served_though_found_later(clock):
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    ledger.add(A, 10)
    ledger.add(B, 10, 992)
    clock.now = 1005
    assert not ledger.is_live(B)
    assert ledger.past(5) == []
    clock.now = 1010
    assert ledger.past(5) == [A, B]


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_time_to_live_is_positive(ttl_s):
    with pytest.raises(ConfigError, match="ttl_s"):
        TierLimits(ttl_s=ttl_s)


@pytest.mark.parametrize("quotas", [{"default_bytes": 0}, {"by_tenant": {"team-a": -5}}])
def test_quotas_are_positive(quotas):
    with pytest.raises(ConfigError, match="must be positive"):
        TenantQuotas(**quotas)


def test_a_tenant_gives_up_its_own_in_its_own_order():
    ledger = Ledger(create_policy("lru"), TierLimits(quotas=TenantQuotas(100)))
    mine = [make_key(i, "mine") for i in range(3)]
    for key in (mine[0], YOURS, mine[1], mine[2]):
        ledger.add(key, 10)
    ledger.access(mine[0])
    assert list(ledger.victims("mine")) == [mine[1], mine[2], mine[0]]
    assert list(ledger.victims("unknown")) == []
    assert list(ledger.victims()) == [YOURS, mine[1], mine[2], mine[0]]


def test_a_tenant_without_chunks_is_forgotten():
    ledger = Ledger(create_policy(), TierLimits(quotas=TenantQuotas(100)))
    for i in range(100):
        key = make_key("a", f"tenant {i}")
        ledger.add(key, 10)
        ledger.remove(key, 10)
    assert ledger._shares == {}


def test_without_limits_nothing_is_past_and_nobody_over(clock):
    ledger = Ledger(create_policy(), None, clock)
    ledger.add(A, 1 << 50)
    clock.now = 1e12
    assert ledger.is_live(A)
    assert ledger.past(5) == []
    assert not ledger.is_over_quota(A.tenant, 1 << 60)
    assert ledger.quota(A.tenant) is None


@pytest.mark.parametrize(
    "sizes", [{}, {MINE: 10}, {MINE: 10, YOURS: 11}, {MINE: 10, YOURS: 10, A: 10}]
)
def test_books_that_differ_are_found(clock, sizes):
    ledger = Ledger(create_policy(), TierLimits(10, TenantQuotas(100)), clock)
    for key in (MINE, YOURS):
        ledger.add(key, 10)
    ledger.check_integrity({MINE: 10, YOURS: 10})
    with pytest.raises(IntegrityError):
        ledger.check_integrity(sizes)
