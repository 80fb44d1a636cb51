"""Which settings of vLLM decide the KV: each field of each release is in one of two reviewed
lists.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache_core.integrations.vllm.kv_settings import (
    CLASSES_WITHOUT_KV,
    VARIABLES_WITHOUT_KV,
    VLLM_SETTINGS,
    set_variables,
)

from tests.fixtures.vllm_declared import RELEASES, Declared, recorded
from tests.fixtures.vllm_engine.shapes import settings

COUNTED = {
    "AttentionConfig": (
        "disable_flashinfer_q_quantization hisparse_config indexer_kv_dtype"
        " indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp"
        " trtllm_ragged_backend use_fp4_indexer_cache use_non_causal"
        " use_prefill_query_quantization use_trtllm_attention"
    ),
    "CacheConfig": (
        "cache_dtype calculate_kv_scales kv_cache_dtype_skip_layers kv_sharing_fast_prefill"
        " mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype replayssm_buffer_len"
        " sliding_window swa_bounded_replay use_kda_recoverssm use_replayssm"
    ),
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "KVCacheDTypeHandler": "name",
    "KernelConfig": (
        "enable_bf16x3_router_gemm linear_backend linear_backend_per_quant moe_backend"
        " monokernel sparse_indexer_topk_backend"
    ),
    "LoRAConfig": (
        "default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras"
        " enable_tower_connector_lora lora_dtype max_lora_cls_labels target_modules"
    ),
    "LoadConfig": "ignore_patterns load_format model_loader_extra_config",
    "MambaConfig": "enable_stochastic_rounding stochastic_rounding_philox_rounds",
    "ModelArchitectureConfig": (
        "architectures derived_max_model_len_and_key head_size hidden_size is_deepseek_mla"
        " is_mm_prefix_lm model_type num_experts num_experts_per_token per_layer_overrides"
        " quantization_config rswa_window text_model_type total_num_attention_heads"
        " total_num_hidden_layers total_num_kv_heads vocab_size"
    ),
    "ModelConfig": (
        "code_revision convert disable_sliding_window dtype hf_config hf_text_config"
        " is_submodel_config model_class_overrides model_impl override_attention_dtype"
        " quantization quantization_config runner trust_remote_code"
        " word_embeddings_untied_by_checkpoint"
    ),
    "MultiModalConfig": (
        "media_io_kwargs mm_device_do_normalize"
        " mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_only mm_processor_kwargs"
        " video_pruning_method video_pruning_rate"
    ),
    "ParallelConfig": (
        "enable_hc_sp eplb_config fault_tolerance_config sd_worker_cls worker_cls"
        " worker_extension_cls"
    ),
    "QuantSpec": "activation weight",
    "QuantizationConfigArgs": "ignore linear moe targets",
    "SpeculativeConfig": (
        "draft_lm_head_quantization draft_load_config draft_model_config"
        " draft_parallel_config draft_tensor_parallel_size index_share_for_mtp_iteration"
        " kv_cache_dtype method moe_backend num_speculative_tokens parallel_drafting"
        " quantization tensor_parallel_size use_heterogeneous_vocab"
    ),
    "VllmConfig": (
        "additional_config attention_config aux_output_config cache_config compilation_config"
        " device_config diffusion_config ec_manager_config ec_transfer_config engram_config"
        " kernel_config kv_events_config kv_transfer_config load_config logging_config"
        " mamba_config model_config observability_config offload_config parallel_config"
        " profiler_config quant_config reasoning_config scheduler_config"
        " structured_outputs_config watchdog_config watermark_config weight_transfer_config"
    ),
    "WeightTransferConfig": "backend",
}
"""Fields that may change the KV: it is not shown that they cannot."""
COUNTED_VARIABLES = (
    "AITER_SITUV2_A8W4 K_SCALE_CONSTANT Q_SCALE_CONSTANT"
    " VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
    " VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_ALLREDUCE_USE_FLASHINFER"
    " VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM"
    " VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"
    " VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_CI_ENV"
    " VLLM_CPU_INT4_W4A8 VLLM_CPU_SGL_KERNEL VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE"
    " VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DEEPEP_BUFFER_SIZE_MB"
    " VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL"
    " VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION"
    " VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DISABLED_KERNELS"
    " VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_SHARED_EXPERTS_STREAM"
    " VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS"
    " VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE"
    " VLLM_ENABLE_PREGRAD_PASSES VLLM_FLASHINFER_ALLREDUCE_BACKEND"
    " VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION"
    " VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_MOE_GEMM_TYPE"
    " VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM"
    " VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_GEMM_RS"
    " VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM"
    " VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_AUDIO_DECODE_DURATION_S"
    " VLLM_MAX_IMAGE_PIXELS VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MEDIA_CONNECTOR"
    " VLLM_MLA_DISABLE VLLM_MM_HASHER_ALGORITHM VLLM_MODEL_REDIRECT_PATH"
    " VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM"
    " VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD"
    " VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_PLE_CPU_OFFLOAD VLLM_PLUGINS"
    " VLLM_REPLICATE_EMBED VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS"
    " VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MLA_DCP_VERIFY"
    " VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_FP8_PADDING"
    " VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE VLLM_ROCM_MUSE_MOE_ONLINE_QUANT"
    " VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"
    " VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB"
    " VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB"
    " VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR"
    " VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM"
    " VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR"
    " VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA"
    " VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2"
    " VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 VLLM_ROCM_USE_AITER_RMSNORM"
    " VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE"
    " VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION"
    " VLLM_ROCM_USE_SKINNY_GEMM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD"
    " VLLM_SSM_CONV_STATE_LAYOUT VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_TEST_FORCE_FP8_MARLIN"
    " VLLM_TEST_FORCE_LOAD_FORMAT VLLM_TPU_USING_PATHWAYS VLLM_TRITON_ATTN_USE_TD"
    " VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_USE_TD VLLM_USE_DEEP_GEMM"
    " VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A"
    " VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FLASHINFER_MOE_INT4"
    " VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_LAYERNAME"
    " VLLM_USE_MODELSCOPE VLLM_USE_NCCL_SYMM_MEM VLLM_USE_OINK_OPS VLLM_USE_TRITON_AWQ"
    " VLLM_USE_V2_MODEL_RUNNER VLLM_VIDEO_LOADER_BACKEND VLLM_XLA_USE_SPMD"
    " VLLM_XPU_ENABLE_XPU_GRAPH VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND"
    " VLLM_XPU_PP_MICROBATCH VLLM_ZENTORCH_WEIGHT_PREPACK V_SCALE_CONSTANT"
)
_LISTED_VARIABLES = " ".join(VARIABLES_WITHOUT_KV.values()).split()


def unreviewed(found: Declared) -> list[str]:
    """What is in neither list."""
    missing = [
        f"{owner}.{name}"
        for part in (found.fields, found.hashed)
        for owner, names in part.items()
        if owner not in CLASSES_WITHOUT_KV
        for name in names
        if name not in VLLM_SETTINGS.fields.get(owner, ())
        and name not in COUNTED.get(owner, "").split()
    ]
    known = {*COUNTED_VARIABLES.split(), *_LISTED_VARIABLES}
    return missing + [name for name in found.variables if name not in known]


@pytest.mark.parametrize("release", RELEASES)
def test_every_setting_of_a_release_is_reviewed(release: str) -> None:
    found = recorded(release)
    assert len(found.fields) > 40
    assert sum(map(len, found.fields.values())) > 400
    assert len(found.variables) > 200
    assert unreviewed(found) == []


def test_the_lists_name_only_what_some_release_declares() -> None:
    releases = [recorded(release) for release in RELEASES]
    declared: dict[str, set[str]] = {}
    for found in releases:
        for owner, names in found.fields.items():
            declared.setdefault(owner, set()).update(names)
    assert set(CLASSES_WITHOUT_KV) <= set(declared)
    for owner, listed in VLLM_SETTINGS.fields.items():
        assert listed <= declared[owner], owner
        assert not listed & set(COUNTED.get(owner, "").split()), owner
    variables = {name for found in releases for name in found.variables}
    assert set(_LISTED_VARIABLES) <= variables
    assert len(_LISTED_VARIABLES) == len(set(_LISTED_VARIABLES))
    assert not set(_LISTED_VARIABLES) & set(COUNTED_VARIABLES.split())


@pytest.mark.parametrize("owner", sorted({*VLLM_SETTINGS.fields, *COUNTED}))
def test_listed_fields_change_no_name_and_all_others_do(owner: str) -> None:
    def name(field: str, value: int) -> str:
        return VLLM_SETTINGS.fingerprint(settings(owner, **{field: value}), owner)

    for field in COUNTED.get(owner, "").split():
        assert name(field, 1) != name(field, 2), field
    for field in VLLM_SETTINGS.fields.get(owner, ()):
        assert name(field, 1) == name(field, 2), field


@pytest.mark.parametrize("owner", sorted(CLASSES_WITHOUT_KV))
def test_a_listed_class_counts_as_not_set(owner: str) -> None:
    given = settings("VllmConfig", some=settings(owner, field=1))
    unset = settings("VllmConfig", some=None)
    assert VLLM_SETTINGS.fingerprint(given, "") == VLLM_SETTINGS.fingerprint(unset, "")


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


@dataclass
class Part:
    size: int


class Own:
    """Keeps its state where `vars` does not see it."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


VALUES: list[Any] = [
    *(None, True, False, 1, 1.0, 1.5, "1", "", float("inf"), b"1", Path("1/2"), Path("1")),
    *(torch.float16, torch.bfloat16, torch.device("cpu"), Kind.FIRST, Kind.SECOND, int, len),
    *([], [1], [1, 2], [[1], 2], [[1, 2]], {}, {"1": 2}, {"1": {"2": 3}}, {1, 2}, {1, 3}),
    *(Part(1), Part(2), SimpleNamespace(size=1), {"size": 1}),
    *(Own(1), Own(2), partial(len), partial(max)),
    *(SimpleNamespace(to_dict=lambda: {"a": 1}), SimpleNamespace(to_dict=lambda: {"a": 2})),
]


def test_other_values_have_other_names() -> None:
    names: dict[str, Any] = {}
    for value in VALUES:
        name = VLLM_SETTINGS.fingerprint({"given": value}, "")
        assert name == VLLM_SETTINGS.fingerprint({"given": value}, "")
        assert name not in names, f"{value!r} is named like {names[name]!r}"
        names[name] = value


def test_where_a_models_configuration_comes_from_does_not_count() -> None:
    def of(**options: Any) -> str:
        return VLLM_SETTINGS.fingerprint(SimpleNamespace(to_dict=lambda: options), "hf_config")

    base = {"rope_theta": 1e4, "text_config": {"layers": 2, "_name_or_path": "a"}}
    same = {
        "text_config": {"_name_or_path": "b", "layers": 2},
        "rope_theta": 1e4,
        "transformers_version": "5",
    }
    assert of(**base) == of(**same)
    assert of(**base) != of(**(base | {"rope_theta": 1e5}))
    assert of(**base) != of(**(base | {"text_config": {"layers": 3}}))
    assert of(**base) != of(**(base | {"architectures": ["Other"]}))


def test_only_variables_that_are_set_and_known_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    monkeypatch.setenv("VLLM_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    known = ["VLLM_MARLIN_INPUT_DTYPE", "VLLM_BATCH_INVARIANT"]
    assert set_variables(known) == {"VLLM_MARLIN_INPUT_DTYPE": "int8"}
