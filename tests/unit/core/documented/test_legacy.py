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
def test_the_names_of_backends_mean_these_tiers(backend, cpu, disk, remote):
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


def test_legacy_takes_its_documented_arguments_in_their_order():
    config = LMCacheEngineConfig.from_legacy(
        64, "local_cpu_disk_remote", "lm://h:1", None, True, False, 0.5, 9, 2.5
    )
    assert (
        config.chunk_size,
        config.remote_url,
        config.remote_serde,
        config.save_decode_cache,
    ) == (64, "lm://h:1", None, True)
    assert (config.blend_recompute_ratio, config.blend_min_tokens, config.max_local_disk_size) == (
        0.5,
        9,
        2.5,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "gpu"},
        {"backend": ""},
        {"backend": "remote", "remote_url": None},
        {"local_cpu": False},
        {"local_disk": "file:///x/"},
    ],
)
def test_legacy_refuses_what_it_cannot_do(options):
    with pytest.raises(ConfigError):
        LMCacheEngineConfig.from_legacy(**options)
