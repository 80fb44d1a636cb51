"""Age and quotas as the ledger of a tier counts them."""

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


def test_chunk_keeps_its_age_unless_it_lies_in_the_future(clock):
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    ledger.add(A, 10, 995)
    ledger.add(B, 10, 2000)
    clock.now = 1006
    assert [ledger.is_live(key) for key in (A, B)] == [False, True]
    clock.now = 1010
    assert not ledger.is_live(B)


def test_chunk_stored_while_the_clock_was_ahead_lives_no_longer_than_others(clock):
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


def test_old_chunk_behind_younger_ones_is_not_served(clock):
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    ledger.add(A, 10)
    ledger.add(B, 10, 992)
    clock.now = 1005
    assert not ledger.is_live(B)
    assert ledger.past(5) == []
    clock.now = 1010
    assert ledger.past(5) == [A, B]


@pytest.mark.parametrize("ttl_s", [0, float("nan")])
def test_time_to_live_must_be_positive(ttl_s):
    with pytest.raises(ConfigError, match="ttl_s"):
        TierLimits(ttl_s=ttl_s)


@pytest.mark.parametrize("quotas", [{"default_bytes": 0}, {"by_tenant": {"team-a": -5}}])
def test_quotas_must_be_positive(quotas):
    with pytest.raises(ConfigError, match="must be positive"):
        TenantQuotas(**quotas)


def test_tenant_evicts_its_own_chunks_in_their_order():
    ledger = Ledger(create_policy("lru"), TierLimits(quotas=TenantQuotas(100)))
    mine = [make_key(i, "mine") for i in range(3)]
    for key in (mine[0], YOURS, mine[1], mine[2]):
        ledger.add(key, 10)
    ledger.access(mine[0])
    assert list(ledger.victims("mine")) == [mine[1], mine[2], mine[0]]
    assert list(ledger.victims("unknown")) == []
    assert list(ledger.victims()) == [YOURS, mine[1], mine[2], mine[0]]


@pytest.mark.parametrize(
    "sizes", [{}, {MINE: 10}, {MINE: 10, YOURS: 11}, {MINE: 10, YOURS: 10, A: 10}]
)
def test_accounts_that_differ_are_detected(clock, sizes):
    ledger = Ledger(create_policy(), TierLimits(10, TenantQuotas(100)), clock)
    for key in (MINE, YOURS):
        ledger.add(key, 10)
    ledger.check_integrity({MINE: 10, YOURS: 10})
    with pytest.raises(IntegrityError):
        ledger.check_integrity(sizes)
