"""Which chunks each eviction policy gives up, and how the default compares with LRU and the optimum
on shortened traces of the bench.
"""

from __future__ import annotations

import random
import sys
from itertools import islice

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.record import MissReason
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.eviction.adaptive import FIRST_FACTOR, MAX_FACTOR
from lmcache_core.storage.eviction.ledger import MAX_RECENT_EVICTIONS, RecentEvictions

from tests.bench import eviction
from tests.suites.chunks import make_key

A, B, C, D = (make_key(name) for name in "abcd")


def test_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'fifo': must be one of adaptive, s3fifo, lru"):
        create_policy("fifo")


def test_reasons_are_remembered_for_the_latest_evictions_only():
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


def keys(prefix, num):
    return [make_key(f"{prefix} {i}") for i in range(num)]


def insert(policy, *new, num_bytes=10):
    for key in new:
        policy.on_insert(key, num_bytes)


def read(policy, *known):
    for key in known:
        policy.on_access(key)


def evict(policy, num):
    gone = []
    for key in islice(policy.victims(), num):
        policy.on_remove(key)
        gone.append(key)
    return gone


def pass_through(policy, new, capacity, num_bytes=10):
    for key in new:
        insert(policy, key, num_bytes=num_bytes)
        if len(policy) > capacity:
            evict(policy, 1)


@pytest.fixture
def adaptive():
    return create_policy("adaptive")


@pytest.fixture
def s3fifo():
    return create_policy("s3fifo")


@pytest.fixture(params=["adaptive", "s3fifo"])
def policy(request):
    return create_policy(request.param)


@pytest.mark.parametrize(("name", "num_hits"), [("lru", 0), ("adaptive", 4), ("s3fifo", 4)])
def test_chunks_read_repeatedly_survive_a_stream_larger_than_the_tier(name, num_hits):
    """As lru, which keeps none of them, shows that the stream is long enough."""
    policy, known, held = create_policy(name), keys("known", 4), set()
    for turn in range(50):
        hits = held & set(known)
        read(policy, *hits)
        for key in [*(set(known) - hits), *keys(f"passing {turn}", 12)]:
            held.add(key)
            insert(policy, key)
            held -= set(evict(policy, max(0, len(held) - 10)))
    assert len(hits) == num_hits


@pytest.mark.parametrize("num_bytes", [10, 0])
def test_chunk_that_returns_late_is_forgotten(policy, num_bytes):
    """Or what is remembered of evicted chunks would grow without bound."""
    passing = keys("passing", 60)
    before = sys.getrefcount(passing[0])
    pass_through(policy, passing, capacity=5, num_bytes=num_bytes)
    after = sys.getrefcount(passing[0])
    assert after == before
    insert(policy, passing[0], A, num_bytes=num_bytes)
    order = evict(policy, len(policy))
    assert order.index(A) == order.index(passing[0]) + 1


def test_unread_chunk_ages_faster_in_bytes_touched(adaptive):
    insert(adaptive, A, num_bytes=10)
    read(adaptive, A)
    insert(adaptive, B, num_bytes=10)
    insert(adaptive, C, num_bytes=9)
    assert next(adaptive.victims()) == A  # 19 bytes ago; 2 * 9 for B
    insert(adaptive, D, num_bytes=1)
    assert next(adaptive.victims()) == B  # 2 * 10 for B, 20 for A


def test_factor_follows_the_chunks_that_return(adaptive):
    held = keys("held", 100)
    insert(adaptive, *held)
    read(adaptive, *held[:50])
    adaptive.on_remove(held[0])
    assert adaptive.factor == pytest.approx(FIRST_FACTOR)
    gone = evict(adaptive, 3)
    assert gone == held[50:53]
    insert(adaptive, *gone)  # a little more room for new ones had kept them
    assert adaptive.factor < FIRST_FACTOR
    factor = adaptive.factor
    evict(adaptive, 47)
    gone = evict(adaptive, 3)
    assert gone == held[1:4]
    insert(adaptive, *gone)
    assert adaptive.factor > factor


class Printed:
    """Algorithm 1 of the paper, line by line, with lists, for chunks of one size and a tier that
    is always full when it makes room.
    """

    def __init__(self):
        self.small, self.main, self.ghosts, self.num_reads = [], [], [], {}

    def insert(self, key):
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.num_reads[key] = 0

    def read(self, key):
        self.num_reads[key] = min(self.num_reads[key] + 1, 3)

    def evict(self):
        while True:
            num_held = len(self.small) + len(self.main)
            if self.small and (10 * len(self.small) >= num_held or not self.main):
                key = self.small.pop(0)
                if self.num_reads[key] <= 1:
                    self.ghosts = [*self.ghosts, key][-int(0.9 * (num_held - 1)) :]
                    return key
                self.num_reads[key] = 0
                self.main.append(key)
            else:
                key = self.main.pop(0)
                if self.num_reads[key] == 0:
                    return key
                self.num_reads[key] -= 1
                self.main.append(key)


@pytest.mark.parametrize("capacity", [3, 10, 40])
def test_s3fifo_is_the_printed_algorithm(s3fifo, capacity):
    rng = random.Random(capacity)
    names, printed, held = keys("name", 100), Printed(), set()
    for _ in range(3000):
        key = (
            names[min(99, int(rng.paretovariate(0.5)) - 1)]
            if rng.random() < 0.5
            else rng.choice(names)
        )
        if key in held:
            s3fifo.on_access(key)
            printed.read(key)
            continue
        if len(held) == capacity:
            gone = evict(s3fifo, 1)
            assert gone == [printed.evict()]
            held -= set(gone)
        insert(s3fifo, key)
        printed.insert(key)
        held.add(key)
    assert printed.main
    assert printed.small


@pytest.fixture(scope="module")
def traces():
    return {
        "chat": eviction.chat_trace(num_conversations=250),
        "rag": eviction.rag_trace(num_requests=500, num_documents=250),
    }


def ratios(trace, share):
    num_slots = int(share * len({key for request in trace for key in request}))
    by_policy = {
        label: eviction.hit_ratio(trace, make(), num_slots)
        for label, make in eviction.POLICIES.items()
    }
    return (
        by_policy["LRU"],
        by_policy["adaptive (default)"],
        eviction.optimal_hit_ratio(trace, num_slots),
        by_policy,
    )


@pytest.mark.parametrize("share", eviction.CAPACITY_SHARES)
@pytest.mark.parametrize("name", ["chat", "rag"])
def test_default_is_never_much_worse_than_lru_and_none_beats_the_optimum(traces, name, share):
    lru, default, optimal, by_policy = ratios(traces[name], share)
    assert 0 < default >= lru - 0.015
    assert max(by_policy.values()) <= optimal <= 1


@pytest.mark.parametrize(("num_read", "limit"), [(0, 1.0), (20, MAX_FACTOR)])
def test_factor_has_limits(adaptive, num_read, limit):
    insert(adaptive, *keys("held", 20))
    for turn in range(30):
        read(adaptive, *adaptive.coldest_first()[:num_read])
        gone = evict(adaptive, 1)
        adaptive.on_remove(adaptive.coldest_first()[-1])
        insert(adaptive, *gone, *keys(f"fresh {turn}", 1))
    assert adaptive.factor == pytest.approx(limit)


def test_s3fifo_probation_takes_a_tenth_of_the_bytes_not_of_the_chunks(s3fifo):
    large, small = keys("large", 2), keys("small", 20)
    insert(s3fifo, *large, num_bytes=1000)
    read(s3fifo, *large, *large)
    insert(s3fifo, *small)
    assert (
        next(s3fifo.victims()) == large[0]
    )  # both have moved to the main queue; 200 bytes on probation of 2200
    insert(s3fifo, A, num_bytes=30)
    assert next(s3fifo.victims()) == small[0]  # 230 of 2230
