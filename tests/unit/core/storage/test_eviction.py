from __future__ import annotations

import random
from itertools import islice

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.record import MissReason
from lmcache_core.storage.eviction import DEFAULT_POLICY, create_policy
from lmcache_core.storage.eviction import adaptive as adaptive_module
from lmcache_core.storage.eviction.adaptive import FIRST_FACTOR, MAX_FACTOR, AdaptivePolicy
from lmcache_core.storage.eviction.ledger import MAX_RECENT_EVICTIONS, RecentEvictions

from tests.suites.chunks import make_key

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
    with pytest.raises(ConfigError, match=r"'fifo': must be one of adaptive, s3fifo, lru"):
        create_policy("fifo")


def test_the_default_policy():
    assert isinstance(create_policy(), AdaptivePolicy)
    assert DEFAULT_POLICY == "adaptive"


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


A, B, C, D = (make_key(name) for name in "abcd")


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


def pass_through(policy, new, capacity):
    for key in new:
        insert(policy, key)
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


def test_what_was_read_stays_while_others_pass_through(s3fifo):
    known = keys("known", 8)
    insert(s3fifo, *known)
    read(s3fifo, *known, *known)
    pass_through(s3fifo, keys("passing", 100), capacity=10)
    assert set(known) < set(s3fifo.victims())


@pytest.mark.parametrize(("name", "num_hits"), [("lru", 0), ("adaptive", 4), ("s3fifo", 4)])
def test_what_is_read_again_and_again_stays_although_more_passes_than_there_is_room(name, num_hits):
    policy, known, held = create_policy(name), keys("known", 4), set()
    for turn in range(50):
        hits = held & set(known)
        read(policy, *hits)
        for key in [*(set(known) - hits), *keys(f"passing {turn}", 12)]:
            held.add(key)
            insert(policy, key)
            held -= set(evict(policy, max(0, len(held) - 10)))
    assert len(hits) == num_hits


def test_probation_is_first_in_first_out(policy):
    passing = keys("passing", 5)
    insert(policy, *passing)
    assert evict(policy, 5) == passing


def test_what_comes_back_soon_after_probation_has_none(policy):
    passing = keys("passing", 10)
    insert(policy, *passing)
    assert evict(policy, 1) == [passing[0]]
    insert(policy, passing[0])
    assert evict(policy, 10) == [*passing[1:], passing[0]]


def test_what_comes_back_late_starts_anew(policy):
    passing = keys("passing", 60)
    pass_through(policy, passing, capacity=5)
    insert(policy, passing[0], A)
    order = evict(policy, len(policy))
    assert order.index(A) == order.index(passing[0]) + 1


@pytest.mark.parametrize("num_bytes", [0, 10])
def test_ghosts_never_outweigh_what_is_held(s3fifo, num_bytes):
    for key in keys("passing", 500):
        insert(s3fifo, key, num_bytes=num_bytes)
        if len(s3fifo) > 5:
            evict(s3fifo, 1)
        assert s3fifo._ghosts.num_bytes <= len(s3fifo) * num_bytes
    assert bool(len(s3fifo._ghosts)) == (num_bytes > 0)


def test_what_is_removed_on_request_leaves_no_ghost(policy):
    insert(policy, A, B, C)
    policy.on_remove(B)
    insert(policy, B, D)
    assert evict(policy, 4) == [A, C, B, D]


def test_the_tail_of_a_chain_goes_before_its_head(policy):
    chain = keys("chain", 6)
    insert(policy, *reversed(chain))
    read(policy, *reversed(chain))
    assert evict(policy, 6) == chain[::-1]


def test_what_was_declined_goes_behind_the_others_and_may_be_removed(policy):
    insert(policy, A, B, C, D)
    read(policy, B, B)
    for key in policy.victims():
        if key == C:
            break  # A, the first one, was declined
    policy.on_remove(D)
    assert evict(policy, 3) == [C, B, A]


def test_what_was_never_read_ages_faster_in_bytes_that_were_touched(adaptive):
    insert(adaptive, A, num_bytes=10)
    read(adaptive, A)
    insert(adaptive, B, num_bytes=10)
    insert(adaptive, C, num_bytes=9)
    assert next(adaptive.victims()) == A  # 19 bytes ago; 2 * 9 for B
    insert(adaptive, D, num_bytes=1)
    assert next(adaptive.victims()) == B  # 2 * 10 for B, 20 for A


def test_what_was_read_is_in_the_order_of_the_last_access(adaptive):
    insert(adaptive, A, B, C)
    read(adaptive, A, B, C, A)
    assert list(adaptive.victims()) == [B, C, A]


def test_the_factor_follows_what_comes_back(adaptive):
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


def test_what_comes_back_from_far_teaches_nothing(adaptive):
    held = keys("held", 20)
    insert(adaptive, *held)
    gone = evict(adaptive, 10)
    insert(adaptive, gone[0])
    assert adaptive.factor == pytest.approx(FIRST_FACTOR)
    insert(adaptive, gone[-1])
    assert adaptive.factor < FIRST_FACTOR
    assert set(adaptive.coldest_first()[-2:]) == {gone[0], gone[-1]}  # both count as read


@pytest.mark.parametrize(("num_read", "limit"), [(0, 1.0), (20, MAX_FACTOR)])
def test_the_factor_has_limits(adaptive, num_read, limit):
    insert(adaptive, *keys("held", 20))
    for turn in range(30):
        read(adaptive, *adaptive.coldest_first()[:num_read])
        gone = evict(adaptive, 1)
        adaptive.on_remove(adaptive.coldest_first()[-1])
        insert(adaptive, *gone, *keys(f"fresh {turn}", 1))
    assert adaptive.factor == pytest.approx(limit)


def test_evicted_keys_are_remembered_up_to_a_multiple_of_what_is_held(adaptive, monkeypatch):
    pass_through(adaptive, keys("passing", 500), capacity=10)
    assert len(adaptive._evicted) == 40
    assert adaptive._remembered_bytes == 400
    monkeypatch.setattr(adaptive_module, "MAX_EVICTED", 20)
    pass_through(adaptive, keys("more", 2), capacity=10)
    assert len(adaptive._evicted) == 20
    for key in list(adaptive._evicted):
        insert(adaptive, key)
    assert adaptive._remembered_bytes == 0


def test_chunks_of_no_bytes_are_bounded_too(adaptive):
    for key in keys("passing", 100):
        insert(adaptive, key, num_bytes=0)
        if len(adaptive) > 5:
            evict(adaptive, 1)
    assert len(adaptive._evicted) == 20


def test_s3fifo_lets_probation_take_a_tenth_of_the_bytes_not_of_the_chunks(s3fifo):
    large, small = keys("large", 2), keys("small", 20)
    insert(s3fifo, *large, num_bytes=1000)
    read(s3fifo, *large, *large)
    insert(s3fifo, *small)
    assert (
        next(s3fifo.victims()) == large[0]
    )  # both have moved to the main queue; 200 bytes on probation of 2200
    insert(s3fifo, A, num_bytes=30)
    assert next(s3fifo.victims()) == small[0]  # 230 of 2230


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


@pytest.mark.parametrize("capacity", [3, 7, 10, 20, 30, 40, 59])
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
