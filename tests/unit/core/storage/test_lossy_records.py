"""A lossless record replaces a lossy one, never the other way around."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.remote import create_remote_backend

from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

TIERS: dict[str, Callable[[Path], StorageBackend]] = {
    "memory": lambda root: LocalCPUBackend(ArenaAllocator.anonymous(1 << 16), create_policy()),
    "disk": lambda root: DiskBackend(root, 1 << 16),
    "file": lambda root: create_remote_backend(f"file://{root}"),
}


@pytest.mark.parametrize("tier", TIERS)
async def test_lossless_record_replaces_a_lossy_one_and_is_never_replaced(
    tmp_path: Path, tier: str
) -> None:
    backend, arena = TIERS[tier](tmp_path), Arena()
    await backend.open()
    lossless, lossy = make_payload("lossless"), make_payload("lossy", 5000)
    for payload, is_lossy, expected in (
        (lossy, True, lossy),
        (b"x", True, lossy),
        (lossless, False, lossless),
        (lossy, True, lossless),
    ):
        assert await backend.batched_put([make_chunk("a", payload=payload, lossy=is_lossy)]) == [
            True
        ]
        [result] = await backend.batched_get([make_key("a")], arena)
        assert payload_of(result) == expected
    if tier != "file":
        assert backend.stats()["used_bytes"] < len(lossy), "the lossy one is charged no more"
    await backend.close()
