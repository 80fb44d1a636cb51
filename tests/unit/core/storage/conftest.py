"""What most tests of tiers need."""

from __future__ import annotations

import pytest
from lmcache_core.keys import ChunkKey

from tests.fixtures.disk_tier import Clock, TroubledFiles


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def removed() -> list[ChunkKey]:
    """Keys that the tier under test has reported as removed."""
    return []


@pytest.fixture
def files() -> TroubledFiles:
    return TroubledFiles()
