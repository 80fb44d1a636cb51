"""What most tests of tiers need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack

from tests.fixtures import disk_tier
from tests.fixtures.disk_tier import Clock, Opened, TroubledFiles
from tests.fixtures.waiting import until


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


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    """Opens disk tiers; at the end they are closed, and their books must balance."""
    async with AsyncExitStack() as exits:

        async def open_disk(root: Path, *arguments: Any, **options: Any) -> DiskBackend:
            disk = await disk_tier.opened(root, *arguments, **options)
            exits.callback(disk.check_integrity)
            exits.push_async_callback(disk.close)
            return disk

        yield open_disk


@pytest.fixture
def arena() -> ArenaAllocator:
    return ArenaAllocator.anonymous(1 << 20)


@pytest.fixture
async def over(arena: ArenaAllocator) -> AsyncIterator[disk_tier.Over]:
    """Opens stacks of the arena and slower tiers; at the end they are closed, and nothing may be
    held.
    """
    async with AsyncExitStack() as exits:

        async def open_stack(*lower: StorageBackend, **options: Any) -> TierStack:
            stack = TierStack(LocalCPUBackend(arena, create_policy()), lower, **options)
            await stack.open()
            exits.push_async_callback(stack.close)
            return stack

        yield open_stack
    await until(lambda: not arena.used_bytes)
    arena.check_integrity()
