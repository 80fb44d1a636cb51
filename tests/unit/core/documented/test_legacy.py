"""The documented names of backends."""

from __future__ import annotations

import pytest
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.legacy_backends import LEGACY_BACKENDS
from lmcache_core.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "cpu", "disk", "remote"),
    [
        ("cpu", True, False, False),
        ("local_disk", False, True, False),
        ("local_cpu_disk", True, True, False),
        ("remote", False, False, True),
        ("local_cpu_remote", True, False, True),
        ("local_disk_remote", False, True, True),
        ("local_cpu_disk_remote", True, True, True),
    ],
)
def test_every_documented_backend_means_these_tiers(backend, cpu, disk, remote):
    config = LMCacheEngineConfig.from_legacy(
        backend=backend, remote_url="redis://r:1", chunk_size=64
    )
    assert config.local_cpu is cpu
    assert (config.local_disk is not None, config.max_local_disk_size) == (
        disk,
        5.0 if disk else 0.0,
    )
    assert config.remote_url == ("redis://r:1" if remote else None)
    assert config.chunk_size == 64
    assert backend in LEGACY_BACKENDS


@pytest.mark.parametrize(
    "options", [{"backend": "gpu"}, {"backend": "remote", "remote_url": None}, {"local_cpu": False}]
)
def test_legacy_refuses_what_it_cannot_do(options):
    with pytest.raises(ConfigError):
        LMCacheEngineConfig.from_legacy(**options)
