from __future__ import annotations

import pytest
from lmcache_core.config import LMCacheEngineMetadata, LMCacheMemPoolMetadata


def test_metadata_describe_the_kv():
    metadata = LMCacheEngineMetadata("m", 1, 0, "vllm", "bfloat16", (4, 2, 256, 8, 64))
    assert metadata.kv_dtype_name == "bfloat16"
    assert metadata.layout_fingerprint() == "KV_BLOB/1;layers=4;sides=2;heads=8;head_size=64;"
    assert (metadata.revision, metadata.adapter, metadata.layout) == ("", "", "")


def test_a_torch_dtype_and_its_name_are_the_same():
    torch = pytest.importorskip("torch")
    assert LMCacheEngineMetadata("m", 1, 0, "vllm", torch.float16, (1, 2, 3, 4, 5)).kv_dtype_name == "float16"
    assert LMCacheMemPoolMetadata((1, 2, 3, 4, 5), torch.float16, 0.5).kv_dtype_name == "float16"


def test_the_metadata_of_a_pool_take_a_dtype_by_name():
    metadata = LMCacheMemPoolMetadata((4, 2, 256, 8, 64), "bfloat16", 1.5)
    assert (metadata.kv_shape, metadata.kv_dtype_name, metadata.max_local_cache_size) == ((4, 2, 256, 8, 64), "bfloat16", 1.5)
