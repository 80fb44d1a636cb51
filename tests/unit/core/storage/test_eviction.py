from __future__ import annotations

from itertools import islice

import pytest
from lmcache_core.config import EVICTION_POLICIES
from lmcache_core.errors import ConfigError
from lmcache_core.record import MissReason
from lmcache_core.storage.eviction import DEFAULT_POLICY, POLICIES, create_policy
from lmcache_core.storage.eviction.recent import MAX_RECENT_EVICTIONS, RecentEvictions
from lmcache_core.storage.eviction.s3fifo import S3FIFOPolicy
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
    with pytest.raises(ConfigError, match=r"'fifo': must be one of s3fifo, lru"):
        create_policy("fifo")


def test_the_config_names_the_policies_there_are():
    assert set(EVICTION_POLICIES) == set(POLICIES)
    assert isinstance(create_policy(), S3FIFOPolicy)
    assert DEFAULT_POLICY == "s3fifo"


def keys(prefix, num):
    return [make_key(f"{prefix} {i}") for i in range(num)]


def evict(policy, num):
    gone = []
    for key in islice(policy.victims(), num):
        policy.on_remove(key)
        gone.append(key)
    return gone


@pytest.fixture
def s3fifo():
    return create_policy("s3fifo")


def test_what_was_read_stays_while_others_pass_through(s3fifo):
    known, passing = keys("known", 8), keys("passing", 100)
    for key in known:
        s3fifo.on_insert(key, 10)
        s3fifo.on_access(key)
    for key in passing:
        s3fifo.on_insert(key, 10)
        if len(s3fifo) > 10:
            evict(s3fifo, 1)
    assert set(known) < set(s3fifo.victims())


def test_probation_takes_a_fifth_of_the_bytes_not_of_the_chunks(s3fifo):
    large, small = keys("large", 2), keys("small", 40)
    for key in large:
        s3fifo.on_insert(key, 1000)
        s3fifo.on_access(key)
    for key in small:
        s3fifo.on_insert(key, 10)
    assert next(s3fifo.victims()) == large[0]  # 400 bytes on probation of 2400
    s3fifo.on_insert(A, 200)
    assert next(s3fifo.victims()) == small[0]  # 600 of 2600


def test_probation_is_first_in_first_out(s3fifo):
    passing = keys("passing", 5)
    for key in passing:
        s3fifo.on_insert(key, 10)
    assert evict(s3fifo, 5) == passing


def test_what_comes_back_soon_after_probation_has_none(s3fifo):
    passing = keys("passing", 10)
    for key in passing:
        s3fifo.on_insert(key, 10)
    assert evict(s3fifo, 1) == [passing[0]]
    s3fifo.on_insert(passing[0], 10)
    assert evict(s3fifo, 10) == [*passing[1:], passing[0]]


def test_what_comes_back_late_starts_anew(s3fifo):
    passing = keys("passing", 60)
    for key in passing:
        s3fifo.on_insert(key, 10)
        if len(s3fifo) > 5:
            evict(s3fifo, 1)
    for key in (passing[0], A):
        s3fifo.on_insert(key, 10)
    order = evict(s3fifo, len(s3fifo))
    assert order.index(A) == order.index(passing[0]) + 1


def test_ghosts_never_outweigh_what_is_held(s3fifo):
    for key in keys("passing", 500):
        s3fifo.on_insert(key, 0)
        if len(s3fifo) > 5:
            evict(s3fifo, 1)
    assert not s3fifo._ghosts
    for key in keys("other", 500):
        s3fifo.on_insert(key, 10)
        if len(s3fifo) > 5:
            evict(s3fifo, 1)
        assert s3fifo._ghost_bytes == sum(s3fifo._ghosts.values()) <= s3fifo._small_bytes + s3fifo._main_bytes


def test_what_is_removed_on_request_leaves_no_ghost(s3fifo):
    for key in (A, B, C):
        s3fifo.on_insert(key, 10)
    s3fifo.on_remove(B)
    assert not s3fifo._ghosts


def test_the_main_queue_is_in_the_order_of_the_last_access(s3fifo):
    for key in (A, B, C):
        s3fifo.on_insert(key, 10)
    for key in (A, B, C, A):
        s3fifo.on_access(key)
    assert list(s3fifo.victims()) == [B, C, A]


def test_the_tail_of_a_chain_goes_before_its_head(s3fifo):
    chain = keys("chain", 6)
    for key in reversed(chain):
        s3fifo.on_insert(key, 10)
    for key in reversed(chain):
        s3fifo.on_access(key)
    assert evict(s3fifo, 6) == chain[::-1]


def test_reasons_are_remembered_for_the_last_ones_only():
    recent = RecentEvictions()
    recent.add(A, MissReason.EXPIRED)
    recent.add(B)
    assert [recent.miss(key).reason for key in (A, B, C)] == [MissReason.EXPIRED, MissReason.EVICTED, MissReason.NEVER_STORED]
    recent.discard(A)
    for i in range(MAX_RECENT_EVICTIONS):
        recent.add(make_key(i))
    assert [recent.miss(key).reason for key in (A, B)] == [MissReason.NEVER_STORED] * 2
