"""vLLM's own views of KV tensors: in each of its layouts, found by our description or refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import PagedGPUConnector, run_canary
from lmcache_core.integrations.vllm.groups import cache_groups, check_packing
from lmcache_core.integrations.vllm.memory import memory_of

pytestmark = pytest.mark.since("0.32")

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 16, 32, 2
HEADS = {"num_kv_heads": 2, "head_size": 8}
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SCATTERED = {"LHBNC", "BHLNC"}
"""Heads outside of blocks."""


def views_of(spec: Any, layout: str, kernel_block_size: int | None = None) -> dict[str, Any]:
    """The tensors of a group's layers, as vLLM makes them."""
    from vllm.v1 import kv_cache_interface as kv
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[layout]
    strides = kv.compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, order)
    names = [f"model.layers.{i}.attn" for i in range(NUM_LAYERS)]
    size = NUM_BLOCKS * NUM_LAYERS * spec.page_size_bytes
    tensor = kv.KVCacheTensor(size, names, layer_stride=strides[0], block_stride=strides[1])
    raw = torch.zeros(size, dtype=torch.int8)
    views = kv.create_kv_cache_views(raw, spec, NUM_BLOCKS, order, tensor, kernel_block_size)
    return dict(zip(names, views, strict=True))


def outcome(spec: Any, layout: str, mode: str, kernel_block_size: int | None = None) -> str:
    """ "served" where the pattern comes back; else why not."""
    tensors = views_of(spec, layout, kernel_block_size)
    config = SimpleNamespace(layer_names=list(tensors), kv_cache_spec=spec)
    try:
        (group,) = cache_groups(SimpleNamespace(kv_cache_groups=[config]))
        check_packing([group], mode)
        memory = memory_of(group, tensors, NUM_BLOCKS, mode, "a.Backend")
        run_canary(PagedGPUConnector(memory.layout), memory.kvcaches, memory.engine, lambda kv: kv)
    except LayoutError as exc:
        return str(exc)
    assert math.prod(memory.kvcaches[0].shape) > 0
    return "served"


def attention(**facts: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    common = {"block_size": BLOCK_SIZE, "dtype": torch.bfloat16}
    return FullAttentionSpec(**(common | HEADS | facts))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
def test_attention(layout: str, dtype: torch.dtype) -> None:
    spec = attention(dtype=dtype)
    assert outcome(spec, layout, "tokens") == "served"
    found = outcome(spec, layout, "blocks")
    assert "contiguous blocks" in found if layout in SCATTERED else found == "served"


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("mode", ["tokens", "blocks"])
def test_blocks_that_a_backend_divides(layout: str, mode: str) -> None:
    assert outcome(attention(), layout, mode, BLOCK_SIZE // 2) == "served"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["tokens", "blocks"])
def test_latent(layout: str, mode: str) -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
    )
    assert outcome(spec, layout, mode) == "served"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows(layout: str) -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(
        block_size=BLOCK_SIZE, dtype=torch.bfloat16, sliding_window=64, **HEADS
    )
    assert outcome(spec, layout, "tokens") == "served"


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("mode", ["tokens", "blocks"])
def test_recurrent_state(layout: str, mode: str) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((3, 64), (2, 8, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
    )
    assert outcome(spec, layout, mode) == "served"
