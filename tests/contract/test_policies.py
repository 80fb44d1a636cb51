"""Every eviction policy keeps the contract."""

from __future__ import annotations

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction import POLICIES, EvictionPolicy, create_policy
from lmcache_core.storage.eviction.tails import TailsFirst

from tests.suites.chunks import make_key
from tests.suites.policy_suite import PolicySuite


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestPolicies(PolicySuite):
    @pytest.fixture
    def policy(self, name: str) -> EvictionPolicy:
        return create_policy(name)


def tail(name: object) -> ChunkKey:
    key = make_key(name)
    return ChunkKey(key.tenant, key.lane.tail, key.packed_hash)


def test_tails_go_before_all_other_chunks_the_oldest_first() -> None:
    policy = TailsFirst(create_policy())
    tails, others = [tail(i) for i in range(3)], [make_key(i) for i in range(3)]
    for key in (others[0], tails[0], others[1], tails[1], others[2], tails[2]):
        policy.on_insert(key, 100)
    policy.on_access(tails[0])
    assert policy.coldest_first()[:3] == tails
    assert policy.tail_bytes == 300
    assert list(policy.victims())[:3] == list(policy.victims())[:3] == tails
    assert len(list(policy.victims())) == 6, "all, though each was declined twice"
    for key in policy.victims():
        policy.on_remove(key)
        break
    assert (policy.oldest_tail, policy.tail_bytes, len(policy)) == (tails[1], 200, 5)
