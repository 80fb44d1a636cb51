"""Every eviction policy keeps the contract."""

from __future__ import annotations

import pytest
from lmcache_core.storage.eviction import POLICIES, EvictionPolicy, create_policy

from tests.suites.policy_suite import PolicySuite


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestPolicies(PolicySuite):
    @pytest.fixture
    def policy(self, name: str) -> EvictionPolicy:
        return create_policy(name)
