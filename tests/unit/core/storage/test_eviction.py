from __future__ import annotations

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.storage.eviction import create_policy
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


def test_every_victim_may_be_removed(lru):
    for key in lru.victims():
        lru.on_remove(key)
    assert len(lru) == 0
    assert list(lru.victims()) == []


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'fifo': must be one of .*lru"):
        create_policy("fifo")
