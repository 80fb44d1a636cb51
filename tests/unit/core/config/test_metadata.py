from __future__ import annotations

import pytest
from lmcache_core.config import LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache_core.config.metadata import KV_DTYPES
from lmcache_core.errors import ConfigError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE

POSSIBLE = {
    "model_name": "m",
    "world_size": 2,
    "worker_id": 1,
    "fmt": "vllm",
    "kv_dtype": "float16",
    "kv_shape": (4, 2, 256, 8, 64),
}


def test_metadata_describe_the_kv():
    metadata = LMCacheEngineMetadata("m", 1, 0, "vllm", "bfloat16", (4, 2, 256, 8, 64))
    assert metadata.kv_dtype_name == "bfloat16"
    assert metadata.layout_fingerprint() == "KV_BLOB/1;layers=4;sides=2;heads=8;head_size=64;"
    assert (metadata.revision, metadata.adapter, metadata.layout) == ("", "", "")


def test_a_torch_dtype_and_its_name_are_the_same():
    import torch

    assert (
        LMCacheEngineMetadata("m", 1, 0, "vllm", torch.float16, (1, 2, 3, 4, 5)).kv_dtype_name
        == "float16"
    )
    assert LMCacheMemPoolMetadata((1, 2, 3, 4, 5), torch.float16, 0.5).kv_dtype_name == "float16"


def test_the_metadata_of_a_pool_take_a_dtype_by_name():
    metadata = LMCacheMemPoolMetadata((4, 2, 256, 8, 64), "bfloat16", 1.5)
    assert (metadata.kv_shape, metadata.kv_dtype_name, metadata.max_local_cache_size) == (
        (4, 2, 256, 8, 64),
        "bfloat16",
        1.5,
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({"world_size": n}, "^world_size=.*from 1") for n in (0, -1, 1.0, "1", True, None)),
        *(
            ({"worker_id": n}, "^worker_id=.* 0 … 1, as world_size says")
            for n in (-1, 2, 0.0, "0", False)
        ),
        ({"world_size": 1}, "^worker_id=1: .* 0 … 0, as world_size says"),
        *(
            ({"kv_dtype": name}, "^kv_dtype=.*one of float64, float32")
            for name in ("half", "", "torch.quint8", "fp8", None)
        ),
        *(
            ({"kv_shape": (4, 2, 256, 8, 64)[:n]}, "^kv_shape=.*num_layers, sides")
            for n in range(5)
        ),
        ({"kv_shape": (4, 2, 256, 8, 64, 1)}, "^kv_shape=.*five whole numbers"),
        *(
            (
                {"kv_shape": tuple(0 if i == at else n for i, n in enumerate((4, 2, 256, 8, 64)))},
                "^kv_shape=.*from 1",
            )
            for at in range(5)
        ),
        ({"kv_shape": (4, 3, 256, 8, 64)}, "sides is 2 for keys and values"),
        ({"kv_shape": (4, 2, 256.0, 8, 64)}, "^kv_shape="),
    ],
    ids=str,
)
def test_impossible_kv_is_refused_with_the_fix(fields, said):
    with pytest.raises(ConfigError, match=said):
        LMCacheEngineMetadata(**(POSSIBLE | fields))


@pytest.mark.parametrize(
    "fields",
    [{}, {"worker_id": 0}, {"kv_shape": (61, 1, 256, 1, 576)}, {"kv_dtype": "torch.bfloat16"}],
    ids=str,
)
def test_the_ends_of_what_is_possible(fields):
    metadata = LMCacheEngineMetadata(**(POSSIBLE | fields))
    assert {name: getattr(metadata, name) for name in fields} == fields


def test_the_dtypes_are_those_whose_size_is_known():
    assert tuple(DTYPE_ITEMSIZE) == KV_DTYPES
