from __future__ import annotations

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.record import MissReason
from lmcache_core.storage.eviction import DEFAULT_POLICY, create_policy
from lmcache_core.storage.eviction.ledger import MAX_RECENT_EVICTIONS, RecentEvictions
from lmcache_core.storage.eviction.s3lru import S3LRUPolicy
from lmcache_core.testing.chunks import make_key

A, B, C = make_key("a"), make_key("b"), make_key("c")


@pytest.fixture
def lru():
    policy = create_policy("lru")
    for key in (A, B, C):
        policy.on_insert(key, 1)
    return policy


def test_victims_come_in_the_order_of_their_last_access(lru):
    lru.on_access(A)
    assert list(lru.victims()) == [B, C, A]


def test_a_declined_victim_counts_as_used_and_comes_once(lru):
    seen = []
    for key in lru.victims():
        seen.append(key)
        if key == B:
            lru.on_remove(key)
            break
    assert seen == [A, B]
    assert list(lru.victims()) == [C, A]


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'fifo': must be one of s3lru, s3fifo, lru"):
        create_policy("fifo")


def test_the_default_policy():
    assert isinstance(create_policy(), S3LRUPolicy)
    assert DEFAULT_POLICY == "s3lru"


def test_reasons_are_remembered_for_the_last_ones_only():
    recent = RecentEvictions()
    recent.add(A, MissReason.EXPIRED)
    recent.add(B)
    assert [recent.miss(key).reason for key in (A, B, C)] == [
        MissReason.EXPIRED,
        MissReason.EVICTED,
        MissReason.NEVER_STORED,
    ]
    recent.discard(A)
    for i in range(MAX_RECENT_EVICTIONS):
        recent.add(make_key(i))
    assert [recent.miss(key).reason for key in (A, B)] == [MissReason.NEVER_STORED] * 2
