"""Our tiers behave as MLPerf Storage's driver expects of a backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lmcache_core.concurrency.bridge import LoopThread
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from typing_extensions import override

from tests.bench import mlperf
from tests.bench.mlperf import TierBackend
from tests.suites.chunks import held_keys

KV = np.arange(2 * 5 * 7, dtype=np.float16).reshape(2, 5, 7)


class SharedTier(LocalCPUBackend):
    """Clearing it removes nothing, as with a remote tier."""

    @override
    async def clear(self, tenant: str | None = None) -> int:
        return 0


@pytest.fixture(params=["memory", "disk", "shared"])
def memory(request: pytest.FixtureRequest) -> LocalCPUBackend:
    kind = SharedTier if request.param == "shared" else LocalCPUBackend
    return kind(HostMemoryAllocator(1 << 20), create_policy())


@pytest.fixture
def backend(
    request: pytest.FixtureRequest,
    memory: LocalCPUBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TierBackend]:
    monkeypatch.setattr(mlperf, "CHUNK_BYTES", 64)  # several chunks an entry, the last a part
    loop = LoopThread("mlperf")
    loop.open()
    tier = DiskBackend(tmp_path, 1 << 20) if "disk" in request.node.name else memory
    loop.run(tier.open(), 60)
    yield TierBackend(loop, memory, tier, SimpleNamespace)
    loop.run(tier.close(), 60)
    loop.close()


def test_a_tier_takes_the_place_of_a_backend_of_mlperf(backend: TierBackend) -> None:
    data = KV.copy()
    backend.write("a", data)
    backend.write("b", KV + 1)
    data[:] = 0  # the driver's array is its own
    found, timing = backend.read("a")
    assert (found.dtype, found.shape, timing.host) == (KV.dtype, KV.shape, 0)
    assert np.array_equal(found, KV)
    found[:] = 0
    assert np.array_equal(backend.read("a")[0], KV)
    backend.write("a", KV[:1] * 2)  # what was there is replaced
    assert np.array_equal(backend.read("a")[0], KV[:1] * 2)
    backend.delete("a")
    backend.delete("a")
    with pytest.raises(KeyError):
        backend.read("a")
    assert np.array_equal(backend.read("b")[0], KV + 1)
    backend.clear()
    with pytest.raises(KeyError):
        backend.read("b")
    backend.write("b", KV[:1])
    assert np.array_equal(backend.read("b")[0], KV[:1])
    with pytest.raises(MemoryError):
        backend.write("c", np.zeros(1 << 21, np.uint8))
    backend.write("d", KV)  # what the last one had taken is free again
    assert np.array_equal(backend.read("d")[0], KV)


def test_damage_is_an_error(backend: TierBackend, memory: LocalCPUBackend, tmp_path: Path) -> None:
    """Not other bytes, as it would be with theirs."""
    backend.write("a", KV)
    files = list(tmp_path.rglob("*.kvr"))
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    if not files:
        [chunk, *_] = memory.get_many(held_keys(memory))
        assert chunk is not None
        chunk.memory.byte_array[0] ^= 1
        chunk.release()
    with pytest.raises(OSError, match="a: "):
        backend.read("a")
