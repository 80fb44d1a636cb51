"""The contract of `BasePool`, over every pool."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.config import LMCacheMemPoolMetadata
from lmcache_core.errors import ConfigError
from lmcache_core.memory import LocalCPUBufferPool, LocalCPUPool, LocalGPUPool, LocalPool
from lmcache_core.memory.tensor import device_arena

from tests.suites.pool_suite import CHUNK_BYTES, DTYPE, KV_SHAPE, PoolSuite, gigabytes


class TestLocal(PoolSuite):
    def make_pool(self, metadata: LMCacheMemPoolMetadata) -> LocalPool:
        return LocalPool(metadata)


class TestCPU(PoolSuite):
    def make_pool(self, metadata: LMCacheMemPoolMetadata) -> LocalCPUPool:
        return LocalCPUPool(metadata)


class TestCPUBuffer(PoolSuite):
    def make_pool(self, metadata: LMCacheMemPoolMetadata) -> LocalCPUBufferPool:
        return LocalCPUBufferPool(metadata)


class DevicePool(LocalGPUPool):
    """A GPU's pool, on the GPU where there is one."""

    def _make_arena(self, size: int) -> torch.Tensor:
        return device_arena(size, "cuda" if torch.cuda.is_available() else "cpu")


class TestGPU(PoolSuite):
    def make_pool(self, metadata: LMCacheMemPoolMetadata) -> DevicePool:
        return DevicePool(metadata)


def test_a_gpu_pool_is_on_a_gpu_or_refused() -> None:
    metadata = LMCacheMemPoolMetadata(KV_SHAPE, DTYPE, gigabytes(CHUNK_BYTES))
    if torch.cuda.is_available():
        kv_obj = LocalGPUPool(metadata).allocate(torch.zeros(KV_SHAPE, dtype=DTYPE))
        assert kv_obj is not None
        assert kv_obj.data.is_cuda
    else:
        with pytest.raises(ConfigError, match="cuda"):
            LocalGPUPool(metadata)


@pytest.mark.parametrize("gb", [0.001, 0.0007, 0.01])
def test_the_number_of_chunks_never_exceeds_the_size(gb: float) -> None:
    pool = LocalPool(LMCacheMemPoolMetadata(KV_SHAPE, "float16", gb))
    assert pool.max_chunk_num == pool.init_max_chunk_num(
        LMCacheMemPoolMetadata(KV_SHAPE, "float16", gb)
    )
    assert 0 <= gb * (1 << 30) - pool.max_chunk_num * CHUNK_BYTES < CHUNK_BYTES


@pytest.mark.parametrize("kv_shape", [(3, 2, 8, 10), (3, 2, 0, 2, 5)])
def test_a_shape_that_is_no_chunk_is_refused(kv_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="kv_shape"):
        LocalPool(LMCacheMemPoolMetadata(kv_shape, DTYPE, 1.0))
