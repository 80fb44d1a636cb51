"""A tier in memory with each kind of codec; at the end nothing may be held and no codec open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy

from tests.fixtures.codecs import ZlibCodec, codecs_of
from tests.fixtures.encoded_tier import opened
from tests.fixtures.wire import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.check_empty()


@pytest.fixture
def hot() -> Iterator[LocalCPUBackend]:
    tier = LocalCPUBackend(ArenaAllocator.anonymous(8 << 20), create_policy())
    yield tier
    tier.check_integrity()
    assert tier.stats()["arena_used_bytes"] == 0


@pytest.fixture
def lossless() -> Iterator[ZlibCodec]:
    codec = ZlibCodec("flate")
    yield codec
    assert codec.num_open == 0


@pytest.fixture
def lossy() -> Iterator[ZlibCodec]:
    codec = ZlibCodec("half", lossy=True)
    yield codec
    assert codec.num_open == 0


@pytest_asyncio.fixture
async def tier(hot: LocalCPUBackend, lossless: ZlibCodec) -> AsyncIterator[EncodedBackend]:
    """Configured lossless; knows no lossy codec."""
    async with opened(EncodedBackend(hot, codecs_of(lossless), "flate")) as tier:
        yield tier


@pytest_asyncio.fixture
async def lossy_tier(
    hot: LocalCPUBackend, lossless: ZlibCodec, lossy: ZlibCodec
) -> AsyncIterator[EncodedBackend]:
    """Configured lossy; the process has a lossless codec too."""
    async with opened(EncodedBackend(hot, codecs_of(lossless, lossy), "half")) as tier:
        yield tier
