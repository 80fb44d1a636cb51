"""vLLM's own views of KV tensors: in each of its layouts, found by our description or refused."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import PagedGPUConnector, run_canary
from lmcache_core.integrations.vllm.groups import cache_groups, check_packing
from lmcache_core.integrations.vllm.memory import create_scales, memory_of

from tests.vllm.engines import release

pytestmark = pytest.mark.since("0.32")

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 16, 32, 2
HEADS = {"num_kv_heads": 2, "head_size": 8}
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SCATTERED = {"LHBNC", "BHLNC"}
"""Heads outside of blocks."""


NOT_HERE = {
    "CUSTOM": "no class of vLLM's own",
    "TORCH_SDPA": "no class: a name for encoders of images",
    "NO_ATTENTION": "its module is missing from the release",
    "FLASHINFER": "imports flashinfer",
    "TRITON_FLASHINFER": "imports flashinfer",
    "FLASHINFER_MLA": "imports flashinfer",
    "CUTLASS_MLA": "asks CUDA at import",
    "ROCM_FLASHMLA_SPARSE_DSV4": "asks CUDA at import",
    "ROCM_FLASHMLA_SPARSE_DSV41": "asks CUDA at import",
    "FLASH_ATTN_MLA": "imports flash attention, built for GPUs only",
    "MINIMAX_M3_SPARSE": "imports torchvision",
    "STEP5_DSA": "imports torchvision",
    "ULTRAQUANT": "imports Triton's types, without which vLLM runs on a CPU",
}
"""Backends whose class cannot be imported without a GPU. On one, those that can are checked."""
if release() >= (0, 33):
    NOT_HERE["ROCM_AITER_UNIFIED_ATTN"] = "asks CUDA at import"
IMPORT_ERRORS = (ImportError, AssertionError, AttributeError, ValueError)
DS_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token in formats whose size does not follow from the head's."""
PACKED_BACKENDS = {
    *("B12X", "ROCM_ATTN", "ROCM_OCTAVE", "ROCM_SEGMENTED_ATTN", "TURBOQUANT"),
    *("CPU_ATTN", "CPU_MLA", "AMX_MLA"),
}
PACKED_DTYPES = {*DS_MLA, "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"}
"""Moved as whole blocks only."""


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


def outcome(
    spec: Any,
    layout: str,
    mode: str,
    kernel_block_size: int | None = None,
    backend: str = "a.Backend",
) -> str:
    """ "served" where the pattern comes back; else why not."""
    tensors = views_of(spec, layout, kernel_block_size)
    config = SimpleNamespace(layer_names=list(tensors), kv_cache_spec=spec)
    try:
        (group,) = cache_groups(SimpleNamespace(kv_cache_groups=[config]))
        check_packing([group], mode)
        memory = memory_of(group, tensors, NUM_BLOCKS, mode, backend)
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


def backends() -> list[Any]:
    """vLLM's attention backends, all that this release names. Each finds the same whatever was
    imported before it: flash attention, which fails here, leaves a part of itself behind.
    """
    with contextlib.suppress(ImportError):
        import vllm.vllm_flash_attn  # noqa: F401
    with contextlib.suppress(ImportError):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return list(AttentionBackendEnum)
    return []


@pytest.mark.smoke
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: str(backend.name))
def test_backends(backend: Any) -> None:
    """Each KV dtype of each backend, in each layout that the backend takes: served by token unless
    packed, and as blocks unless heads are outside of them.
    """
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1 import kv_cache_interface as kv

    if backend.name in NOT_HERE and not torch.cuda.is_available():
        with pytest.raises(IMPORT_ERRORS):
            backend.get_class()
        return
    try:
        found = backend.get_class()
    except IMPORT_ERRORS as exc:
        if backend.name not in NOT_HERE:
            raise
        pytest.skip(f"not here either: {backend.name}: {exc!r}")
    if backend.name == "ROCM_OCTAVE":  # a layer says so before it is asked for sizes
        from vllm.v1.attention.ops.rocm_octave import register_rope_dim

        register_rope_dim(64, 64)
    sizes = found.get_supported_kernel_block_sizes()
    block_size = max(BLOCK_SIZE // 2, *(getattr(size, "base", size) for size in sizes))
    layouts = found.supported_kv_cache_layouts()
    for dtype in found.supported_kv_cache_dtypes:
        facts = {
            "block_size": block_size,
            "dtype": torch.bfloat16 if dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[dtype],
            "kv_quant_mode": kv.get_kv_quant_mode(dtype),
        }
        if found.is_mla():
            facts |= {"cache_dtype_str": dtype, "state_content_bytes": DS_MLA.get(dtype)}
            spec = kv.MLAAttentionSpec(num_kv_heads=1, head_size=576, **facts)
        else:
            spec = kv.FullAttentionSpec(num_kv_heads=2, head_size=64, **facts)
        spec = found.customize_spec(spec)
        is_packed = backend.name in PACKED_BACKENDS or dtype in PACKED_DTYPES
        for layout in LAYOUTS if layouts is None else [layout.name for layout in layouts]:
            name = f"{found.__module__}.{found.__qualname__}"
            by_token, as_blocks = (
                outcome(spec, layout, mode, None, name) for mode in ("tokens", "blocks")
            )
            assert ("packs its KV" in by_token) if is_packed else by_token == "served", dtype
            is_apart = layout in SCATTERED and spec.num_kv_heads > 1
            assert ("contiguous" in as_blocks) if is_apart else as_blocks == "served", dtype


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("dtype", ["int4", "int8", "fp8"])
def test_loaded_scales_survive_the_first_write(layout: str, dtype: str) -> None:
    """vLLM creates the scales inside blocks at a layer's first write, and sets all of them."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    dtype += "_per_token_head"
    mode = get_kv_quant_mode(dtype)
    spec = attention(dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype], kv_quant_mode=mode)
    tensors = views_of(TritonAttentionBackend.customize_spec(spec), layout)
    layers = {}
    for name, tensor in tensors.items():
        impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
        impl._kv_quant_mode, impl.fp8_dtype = mode, torch.float8_e4m3fn
        layers[name] = SimpleNamespace(
            impl=impl, kv_cache=tensor, kv_cache_dtype=dtype, get_attn_backend=None
        )
    compilation = SimpleNamespace(static_forward_context=layers)
    create_scales(SimpleNamespace(compilation_config=compilation), tensors)
    loaded = torch.randint(0, 100, tensors["model.layers.1.attn"].shape, dtype=torch.uint8)
    for layer in layers.values():
        layer.kv_cache.copy_(loaded)
        layer.impl._pth_key_value_caches(layer.kv_cache)
        assert torch.equal(layer.kv_cache.view(torch.uint8), loaded)


def test_scales_created_elsewhere_are_refused() -> None:
    layer = SimpleNamespace(
        impl=object(), kv_cache=None, kv_cache_dtype="int2_per_token_head", get_attn_backend=None
    )
    compilation = SimpleNamespace(static_forward_context={"attn": layer})
    with pytest.raises(LayoutError, match="kv_cache_dtype=int2_per_token_head: object keeps"):
        create_scales(SimpleNamespace(compilation_config=compilation), ["attn"])
