"""The documented names of backends, and the interface of a backend of tensors."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.legacy_backends import LEGACY_BACKENDS
from lmcache_core.errors import ConfigError
from lmcache_core.storage import LMCBackendInterface

from tests.suites.chunks import make_key


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


def key(name: object):
    return make_key(name).key


class Plain(LMCBackendInterface):
    def __init__(self, dst_device: str = "cuda") -> None:
        super().__init__(dst_device)
        self.tensors: dict[object, torch.Tensor] = {}

    def put(self, key, kv_chunk, blocking=True):
        self.tensors[key] = kv_chunk

    def contains(self, key):
        return key in self.tensors

    def get(self, key):
        return self.tensors.get(key)

    def close(self): ...


def test_batches_fall_back_to_single_calls() -> None:
    plain = Plain()
    assert plain.dst_device == "cuda"
    assert plain.batched_put([(key(i), torch.full((2,), i)) for i in range(3)]) == 3
    got = list(plain.batched_get([key(1), key("never")]))
    assert got[0].tolist() == [1, 1]
    assert got[1] is None
    with pytest.raises(RuntimeError):
        Plain("abacus")
    with pytest.raises(TypeError):
        LMCBackendInterface("cpu")  # type: ignore[abstract]
