"""What every eviction policy must do. A test module subclasses `PolicySuite` and gives it a
`policy` fixture.
"""

from __future__ import annotations

import random
from itertools import islice

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction import EvictionPolicy

from tests.suites.chunks import make_key

NUM_KEYS = 30
TENANTS = ("one", "two", "three")
KEYS = tuple(make_key(i, TENANTS[i % len(TENANTS)]) for i in range(NUM_KEYS))
STRANGER = make_key("stranger")


class PolicySuite:
    """The contract of `EvictionPolicy`; `policy` is the fixture to provide: an empty one."""

    @pytest.fixture
    def filled(self, policy: EvictionPolicy) -> EvictionPolicy:
        """A policy that knows `KEYS`, some of them read since."""
        for key in KEYS:
            policy.on_insert(key, 100)
        for key in KEYS[::3]:
            policy.on_access(key)
        return policy

    def test_an_empty_one_has_no_victims(self, policy: EvictionPolicy) -> None:
        assert len(policy) == 0
        assert list(policy.victims()) == []

    def test_every_known_key_is_a_victim_once_even_if_all_are_declined(
        self, filled: EvictionPolicy
    ) -> None:
        for _ in range(3):
            offered = list(filled.victims())
            assert len(offered) == NUM_KEYS
            assert set(offered) == set(KEYS)
        assert len(filled) == NUM_KEYS

    def test_every_victim_may_be_removed(self, filled: EvictionPolicy) -> None:
        gone = []
        for key in filled.victims():
            filled.on_remove(key)
            gone.append(key)
            assert len(filled) == NUM_KEYS - len(gone)
        assert sorted(gone, key=KEYS.index) == list(KEYS)
        assert list(filled.victims()) == []

    @pytest.mark.parametrize("seed", range(5))
    def test_some_may_be_removed_and_others_declined(
        self, filled: EvictionPolicy, seed: int
    ) -> None:
        rng = random.Random(seed)
        gone: set[ChunkKey] = set()
        declined: set[ChunkKey] = set()
        for key in filled.victims():
            assert key not in gone | declined
            if rng.random() < 0.5:
                filled.on_remove(key)
                gone.add(key)
            else:
                declined.add(key)
        assert gone | declined == set(KEYS)
        assert set(filled.victims()) == declined
        assert len(filled) == len(declined)

    def test_victims_come_lazily_and_a_look_changes_nothing(self, filled: EvictionPolicy) -> None:
        first = next(filled.victims())
        assert next(filled.victims()) == first
        assert set(filled.victims()) == set(KEYS)

    def test_the_coldest_come_first_and_telling_changes_nothing(
        self, filled: EvictionPolicy
    ) -> None:
        before = next(iter(filled.victims()))
        order = filled.coldest_first()
        assert sorted(order, key=KEYS.index) == list(KEYS)
        assert filled.coldest_first() == order
        assert next(iter(filled.victims())) == before
        num_unread = NUM_KEYS - len(KEYS[::3])
        assert set(order[num_unread:]) == set(KEYS[::3]), (
            "what was read is hotter than what was not"
        )

    def test_what_was_declined_is_not_the_next_one_to_go(self, filled: EvictionPolicy) -> None:
        declined, second = islice(filled.victims(), 2)
        assert next(filled.victims()) == second
        assert list(filled.victims()).index(declined) > 5

    def test_victims_after_the_loop_was_left_are_fresh(self, filled: EvictionPolicy) -> None:
        for key in filled.victims():
            filled.on_remove(key)
            break
        filled.on_insert(STRANGER, 100)
        offered = list(filled.victims())
        assert len(offered) == len(set(offered)) == NUM_KEYS
        assert STRANGER in offered

    def test_what_has_never_been_read_goes_first(self, policy: EvictionPolicy) -> None:
        for key in KEYS:
            policy.on_insert(key, 100)
        for key in KEYS[10:]:
            policy.on_access(key)
        assert set(islice(policy.victims(), 4)) <= set(KEYS[:10])

    def test_a_key_may_come_back(self, policy: EvictionPolicy) -> None:
        for _ in range(5):
            for key in KEYS:
                policy.on_insert(key, 100)
            for key in policy.victims():
                policy.on_remove(key)
        assert len(policy) == 0

    def test_a_key_is_inserted_once_and_only_known_ones_are_read_or_removed(
        self, filled: EvictionPolicy
    ) -> None:
        with pytest.raises(AssertionError):
            filled.on_insert(KEYS[0], 100)
        for report in (filled.on_access, filled.on_remove):
            with pytest.raises(KeyError):
                report(STRANGER)

    def test_sizes_may_differ_and_be_nothing(self, policy: EvictionPolicy) -> None:
        for i, key in enumerate(KEYS):
            policy.on_insert(key, (0, 1, 512, 1 << 40)[i % 4])
        assert set(policy.victims()) == set(KEYS)

    def test_one_made_without_arguments_is_empty(self, filled: EvictionPolicy) -> None:
        fresh = type(filled)()
        assert len(fresh) == 0
        fresh.on_insert(KEYS[0], 100)
        assert len(filled) == NUM_KEYS

    @pytest.mark.parametrize("seed", range(5))
    def test_whatever_happens_it_knows_what_is_held(
        self, policy: EvictionPolicy, seed: int
    ) -> None:
        rng = random.Random(seed)
        held: set[ChunkKey] = set()
        for _ in range(2000):
            key = rng.choice(KEYS)
            if key not in held:
                policy.on_insert(key, rng.randrange(1000))
                held.add(key)
            elif rng.random() < 0.6:
                policy.on_access(key)
            else:
                policy.on_remove(key)
                held.remove(key)
            if len(held) > 20:
                for victim in policy.victims():
                    if rng.random() < 0.8:
                        policy.on_remove(victim)
                        held.remove(victim)
                    if len(held) <= 15:
                        break
            assert len(policy) == len(held)
        assert set(policy.victims()) == held
