"""What stands behind an engine, and which options it has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_core.engine.stores import create_chunk_store
from lmcache_core.errors import ConfigError
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.storage import StorageManager
from lmcache_core.storage.guard import Guard
from lmcache_core.storage.manager import engine_spec
from lmcache_core.storage.tiers import build_tiers
from lmcache_core.telemetry import Counters

from tests.fixtures.kv import make_config, make_metadata


def test_the_config_chooses_once() -> None:
    allocator = HostMemoryAllocator(1 << 16)
    assert isinstance(
        create_chunk_store(make_config(), make_metadata(), allocator, Counters()), StorageManager
    )
    assert isinstance(
        create_chunk_store(make_config(sidecar_socket="/s"), make_metadata(), None, Counters()),
        SidecarChunkStore,
    )
    with pytest.raises(ConfigError, match="memory_allocator"):
        create_chunk_store(make_config(), make_metadata(), None, Counters())


def test_every_slower_tier_has_a_guard(tmp_path: Path) -> None:
    config = make_config(
        local_disk=f"file://{tmp_path}/", max_local_disk_size=0.01, remote_url="lm://localhost:1"
    )
    tiers = build_tiers(engine_spec(config, HostMemoryAllocator(1 << 16))).lower
    assert [tier.name for tier in tiers] == ["disk", "storage"]
    assert all(isinstance(tier, Guard) for tier in tiers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"enable_p2p": True, "lookup_url": "http://l", "distributed_url": "lm://d:1"},
            "set all three",
        ),
        (
            {
                "enable_p2p": True,
                "sidecar_socket": "/s",
                "lookup_url": "http://l",
                "distributed_url": "lm://d:1",
            },
            "served by the sidecar",
        ),
        ({"disk_fsync": True}, "set local_disk"),
        ({"local_disk_serde": "cachegen"}, "set local_disk"),
        ({"sidecar_socket": "/s", "remote_serde": "cachegen"}, "the sidecar's remote_serde"),
        ({"sidecar_socket": "/s", "local_disk_serde": "lossless"}, "the sidecar's disk_serde"),
        (
            {"sidecar_socket": "/s", "local_disk": "file:///d/", "max_local_disk_size": 1},
            "disk_path",
        ),
        ({"sidecar_socket": "/s", "max_local_disk_size": 1}, "disk_gb"),
        ({"sidecar_socket": "/s", "local_cpu": False}, "keeps chunks in its memory"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(**options)


def test_a_salt_beside_a_sidecar_is_a_contradiction() -> None:
    """The sidecar's would silently replace it, and chunks would be shared that were meant to be
    apart.
    """
    with pytest.raises(ConfigError, match="salt_file") as caught:
        make_config(sidecar_socket="/s", salt="tenant-secret")
    assert "tenant-secret" not in str(caught.value)
