from __future__ import annotations

import pytest
from lmcache_core.config import LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache_core.config.metadata import KV_DTYPES
from lmcache_core.errors import ConfigError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE

SHAPE = (4, 2, 256, 8, 64)
POSSIBLE = {
    "model_name": "m",
    "world_size": 2,
    "worker_id": 1,
    "fmt": "vllm",
    "kv_dtype": "float16",
    "kv_shape": SHAPE,
}


def test_torch_dtype_and_its_name_are_the_same():
    import torch

    for dtype in (torch.float16, "float16"):
        metadata = LMCacheEngineMetadata("m", 1, 0, "vllm", dtype, SHAPE)
        assert metadata.kv_dtype_name == "float16"
        assert LMCacheMemPoolMetadata(SHAPE, dtype, 0.5).kv_dtype_name == "float16"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        *(({"world_size": n}, "^world_size=.*from 1") for n in (0, 1.0, True)),
        *(({"worker_id": n}, "^worker_id=.* 0 … 1, as world_size says") for n in (-1, 2, "0")),
        ({"world_size": 1}, "^worker_id=1: .* 0 … 0, as world_size says"),
        *(({"kv_dtype": n}, "^kv_dtype=.*one of float64, float32") for n in ("half", None)),
        *(({"kv_shape": shape}, "^kv_shape=.*five whole numbers") for shape in ((), (*SHAPE, 1))),
        *(
            ({"kv_shape": (*SHAPE[:at], 0, *SHAPE[at + 1 :])}, "^kv_shape=.*from 1")
            for at in range(5)
        ),
        ({"kv_shape": (4, 3, 256, 8, 64)}, "sides is 2 for keys and values"),
        ({"kv_shape": (4, 2, 256.0, 8, 64)}, "^kv_shape="),
    ],
    ids=str,
)
def test_impossible_kv_is_refused_with_the_fix(fields, error):
    with pytest.raises(ConfigError, match=error):
        LMCacheEngineMetadata(**(POSSIBLE | fields))


@pytest.mark.parametrize(
    "fields", [{"worker_id": 0}, {"kv_shape": (61, 1, 256, 1, 576)}, {"kv_dtype": "torch.bfloat16"}]
)
def test_possible_kv_is_accepted(fields):
    metadata = LMCacheEngineMetadata(**(POSSIBLE | fields))
    assert {name: getattr(metadata, name) for name in fields} == fields


def test_size_of_every_dtype_is_known():
    assert tuple(DTYPE_ITEMSIZE) == KV_DTYPES
