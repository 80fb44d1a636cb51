"""Names the settings of vLLM that decide the KV: all of them, except a reviewed list.

A setting that is not listed here enters the name, also one of a release that is not reviewed
yet: then engines share less, never wrongly. A listed one cannot change the KV of a token beyond
the rounding by which GPUs and kernels differ anyway, or is named elsewhere. Imports nothing of
vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from lmcache_core.integrations.reviewed_settings import ReviewedSettings, digest_of

CLASSES_WITHOUT_KV: Final = {
    "AudioDummyOptions": "sizes of examples by which memory is measured",
    "AuxOutputConfig": "returns the experts that were chosen",
    "BaseDummyOptions": "how many contents a request may have",
    "CompilationConfig": "how the same computation is compiled and captured",
    "DeviceConfig": "where it runs",
    "DynamicShapesConfig": "how the same computation is compiled",
    "ECTransferConfig": "moves the output of encoders",
    "EPLBConfig": "where copies of experts are placed",
    "EncoderCacheManagerConfig": "keeps the output of encoders",
    "FaultToleranceConfig": "how failures are handled",
    "ImageDummyOptions": "sizes of examples by which memory is measured",
    "IrOpPriorityConfig": "which implementation of the same operation",
    "KVEventsConfig": "who is told what is cached",
    "KVTransferConfig": "connectors; the options of ours have names of their own",
    "LoggingConfig": "logs",
    "MultiModalDummyOptionsBuiltins": "how many contents a request may have",
    "ObservabilityConfig": "metrics and traces",
    "OffloadConfig": "where weights wait until they are needed",
    "PassConfig": "how the same computation is compiled",
    "PoolerConfig": "what is made of the last hidden states",
    "PrefetchOffloadConfig": "where weights wait until they are needed",
    "ProfilerConfig": "profiles",
    "Range": "sizes for which a computation is compiled",
    "ReasoningConfig": "parses answers",
    "SpeechToTextConfig": "how audio becomes prompts",
    "SpeechToTextParams": "how audio becomes prompts",
    "StructuredOutputsConfig": "limits which tokens are sampled",
    "UVAOffloadConfig": "where weights wait until they are needed",
    "VideoDummyOptions": "sizes of examples by which memory is measured",
    "WatchdogConfig": "watches for hangs",
    "WatermarkConfig": "which tokens are sampled",
}
"""Classes of settings none of which can change the KV, and what they are for."""

_FIELDS_WITHOUT_KV: Final[Mapping[str, Mapping[str, str]]] = {
    "VllmConfig": {
        "named with a request's adapter": "lora_config",
        "named as the draft": "speculative_config",
        "which process this is": "instance_id",
        "choose settings that are counted themselves": "optimization_level performance_mode",
        "how it ends": "shutdown_timeout",
    },
    "ModelConfig": {
        "the weights are named by their content": "model model_weights revision seed",
        "its content is counted as hf_config": "config_format hf_config_path hf_overrides",
        "named with a request's contents": "multimodal_config",
        "see `_depends_on_length`": "generation_config max_model_len override_generation_config",
        "tokens are named, not texts": (
            "skip_tokenizer_init tokenizer tokenizer_mode tokenizer_revision"
        ),
        "what clients may send, and under which name": (
            "allowed_local_media_path allowed_media_domains enable_prompt_embeds"
            " io_processor_plugin renderer_num_workers served_model_name"
        ),
        "what happens after the hidden states": (
            "enable_return_routed_experts enable_trace_replay logits_processors logprobs_mode"
            " max_logprobs pooler_config return_sampling_mask use_fp64_gumbel"
        ),
        "how the same computation is run": "disable_cascade_attn enforce_eager",
        "limits of drafts": "spec_target_max_model_len",
        "memory": (
            "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_backend"
            " sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
        ),
        "access to files": "allow_deprecated_quantization hf_token",
    },
    "CacheConfig": {
        "named with the layout of blocks": (
            "_block_size_resolved block_size effective_attention_block_size hash_block_size"
            " kv_cache_layout mamba_block_size mamba_page_size_padded skip_page_size_padded"
            " user_specified_block_size user_specified_mamba_block_size"
        ),
        "how much fits": (
            "gpu_memory_utilization is_attention_free kv_cache_max_concurrency"
            " kv_cache_memory_bytes kv_cache_size_tokens num_cpu_blocks num_gpu_blocks"
            " num_gpu_blocks_override"
        ),
        "what vLLM's own caches keep and find": (
            "cache_hit_alignment_tokens enable_mamba_fine_grained_prefix_cache"
            " enable_mamba_shared_prefix_checkpoint enable_prefix_caching kv_offloading_backend"
            " kv_offloading_size prefix_cache_retention_interval prefix_caching_hash_algo"
            " prefix_match_unit simple_cpu_offload_num_blocks"
        ),
    },
    "ParallelConfig": {
        "named with the layout of ranks": (
            "pipeline_parallel_size rank tensor_parallel_size world_size"
        ),
        "refused where it counts": (
            "_allow_auto_resolve_cp_interleave_size cp_kv_cache_interleave_size dcp_comm_backend"
            " dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size"
            " prefill_context_parallel_size"
        ),
        "which replica this is": (
            "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb"
            " data_parallel_index data_parallel_rank data_parallel_rank_local data_parallel_size"
            " data_parallel_size_local dp_sync_interval elastic_ep_max_dp_size enable_elastic_ep"
        ),
        "addresses and ports": (
            "_coord_store_port _data_parallel_master_port_list data_parallel_master_ip"
            " data_parallel_master_port data_parallel_rpc_port master_addr master_port node_rank"
            " nnodes"
        ),
        "which processes and devices do it": (
            "_api_process_count _api_process_rank assigned_physical_gpu_ids"
            " distributed_executor_backend max_parallel_loading_workers numa_bind numa_bind_cpus"
            " numa_bind_nodes placement_group ray_runtime_env ray_workers_use_nsight"
        ),
        "how tokens and sums travel between workers": (
            "all2all_backend dbo_decode_token_threshold dbo_prefill_token_threshold"
            " disable_custom_all_reduce disable_nccl_for_dp_synchronization"
            " enable_batch_sharded_sampling enable_dbo enable_ep_weight_filter enable_eplb"
            " enable_expert_parallel enable_shm_tensor_arena expert_placement_strategy is_moe_model"
            " ubatch_size"
        ),
        "how failures are handled": (
            "cpu_distributed_timeout_seconds distributed_timeout_seconds enable_fault_tolerance"
        ),
    },
    "SchedulerConfig": {
        "how many tokens and requests a step takes": (
            "disable_chunked_mm_input enable_chunked_prefill encoder_cache_size"
            " long_prefill_token_threshold long_prefill_token_threshold_adaptive"
            " max_num_active_seqs max_num_batched_tokens max_num_encoder_input_tokens"
            " max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs"
            " prefill_schedule_interval scheduler_reserve_full_isl watermark"
        ),
        "in which order": "async_scheduling policy scheduler_cls stream_interval",
        "counted with the model": "is_multimodal_model runner_type",
        "named with the groups": "disable_hybrid_kv_cache_manager",
    },
    "LoadConfig": {
        "how the same files are read": (
            "device download_dir pt_load_map_location safetensors_load_strategy"
            " safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load"
        ),
    },
    "AttentionConfig": {
        "how the same attention is computed": (
            "backend backend_per_kind flash_attn_max_num_splits_for_cuda_graph flash_attn_version"
            " flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size"
            " minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa"
            " sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv"
            " tq_max_kv_splits_for_cuda_graph use_prefill_decode_attention"
        ),
    },
    "KernelConfig": {
        "warm-up": (
            "enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup"
            " enable_rocm_segmented_attn_autotune"
        ),
        "which implementation of the same operation": "ir_op_priority",
    },
    "MambaConfig": {"how the same states are computed": "backend ssu_algorithm"},
    "EngramConfig": {
        "where the embeddings lie": "cpu_offload dp_shared_memory embedding_across_dp use_thp"
    },
    "LoRAConfig": {
        "how many adapters fit": "max_cpu_loras max_lora_rank max_loras",
        "how the same adapter is computed": "fully_sharded_loras specialize_active_lora",
    },
    "MultiModalConfig": {
        "what clients may send": "allow_missing_mm_embeddings enable_mm_embeds",
        "how many contents a request may have": "language_model_only limit_per_prompt",
        "how contents travel and are kept": (
            "mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb"
            " mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc"
        ),
        "how the same encoder is run": "mm_encoder_attn_backend mm_encoder_tp_mode",
        "written, not read": "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path",
        "tokens are named, not texts": "interleave_mm_strings",
        "measures memory": "skip_mm_profiling",
    },
    "SpeculativeConfig": {
        "the draft's weights are named by their content": "code_revision model revision",
        "the engine's own": "target_model_config target_parallel_config",
        "which drafts are tried and accepted": (
            "disable_padded_drafter_batch draft_sample_method dspark_draft_topk"
            " enable_adaptive_verification fly_entropy_threshold fly_entropy_top_k fly_window_size"
            " num_speculative_tokens_per_batch_size rejection_sample_method"
            " synthetic_acceptance_length synthetic_acceptance_rates use_local_argmax_reduction"
            " xpress_topc"
        ),
        "drafts without KV": (
            "prompt_lookup_max prompt_lookup_min suffix_decoding_max_cached_requests"
            " suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth"
            " suffix_decoding_min_token_prob"
        ),
        "how the same computation is run": "attention_backend enforce_eager max_model_len",
        "what vLLM's own caches keep and find": (
            "disable_eagle_block_drop disable_lookahead_block_hashes"
        ),
    },
}

VARIABLES_WITHOUT_KV: Final[Mapping[str, str]] = {
    "named with the layout": "VLLM_KV_CACHE_LAYOUT VLLM_PP_LAYER_PARTITION",
    "how vLLM is built": (
        "CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE"
        " VLLM_BUILD_URL VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION"
        " VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_TARGET_DEVICE"
        " VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST"
    ),
    "where files lie": (
        "CUDA_HOME LD_LIBRARY_PATH VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT"
        " VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH"
        " VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"
        " VLLM_HAS_FLASHINFER_CUBIN VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST"
        " VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS"
        " VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH"
        " VLLM_TUNED_CONFIG_FOLDER VLLM_XLA_CACHE_PATH"
    ),
    "addresses, ports and ranks": (
        "CUDA_VISIBLE_DEVICES LOCAL_RANK VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK"
        " VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT"
        " VLLM_GPU_NIC_PCIE_MAPPING VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_NIC_SELECTION_VARS"
        " VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST"
        " VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT VLLM_RAY_BUNDLE_INDICES"
        " VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS"
    ),
    "processes, and what travels between them": (
        "VLLM_DISABLE_PYNCCL VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_ELASTIC_EP_DRAIN_REQUESTS"
        " VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_V1_MULTIPROCESSING"
        " VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_MQ_MAX_CHUNK_BYTES_MB"
        " VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NIXL_EP_MAX_NUM_RANKS"
        " VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_PROCESS_NAME_PREFIX"
        " VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
        " VLLM_RAY_PER_WORKER_GPUS VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_SKIP_P2P_CHECK"
        " VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM"
        " VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_SPINLOOP_EXT"
        " VLLM_WORKER_MULTIPROC_METHOD"
    ),
    "other connectors and tiers": (
        "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME"
        " VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"
        " VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT"
        " VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO"
        " VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG"
        " VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS"
        " VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_USE_SIMPLE_KV_OFFLOAD"
    ),
    "timeouts and limits": (
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_AUDIO_FETCH_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL"
        " VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_ENGINE_ITERATION_TIMEOUT_S"
        " VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
        " VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT"
        " VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES"
        " VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"
        " VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_EMBED_DECODE_BYTES"
        " VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES"
        " VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES"
        " VLLM_MAX_STOP_STRINGS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT"
        " VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_REGEX_COMPILATION_TIMEOUT_S"
        " VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_VIDEO_FETCH_TIMEOUT"
        " VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_XGRAMMAR_CACHE_MB"
    ),
    "secrets and statistics": (
        "S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_API_KEY VLLM_DO_NOT_TRACK"
        " VLLM_NO_USAGE_STATS VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER"
    ),
    "logs, metrics and checks": (
        "FORCE_COLOR NO_COLOR VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING"
        " VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH"
        " VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE"
        " VLLM_DISABLE_LOG_LOGO VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK VLLM_LOGGING_COLOR"
        " VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM"
        " VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL"
        " VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG VLLM_RAISE_ON_LOGIT_NANS"
        " VLLM_REQUEST_BODY_LOG_LEVEL VLLM_TRACE_FUNCTION"
    ),
    "what clients ask and get": (
        "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_RUNTIME_LORA_UPDATING"
        " VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
        " VLLM_ENABLE_COHERE_API VLLM_ENABLE_RESPONSES_API_STORE"
        " VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS"
        " VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_SERVER_DEV_MODE"
        " VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE"
        " VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT"
        " VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_RUST_BENCH"
        " VLLM_USE_RUST_FRONTEND VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE"
        " VLLM_XPU_USE_SAMPLER_KERNEL"
    ),
    "memory, compilation and warm-up": (
        "VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU"
        " VLLM_CPU_OMP_THREADS_BIND VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_COMPILE_CACHE"
        " VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_STARTUP_PLAN VLLM_FASTSAFETENSORS_QUEUE_SIZE"
        " VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"
        " VLLM_FORCE_AOT_LOAD VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
        " VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"
        " VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TRITON_JIT_WARMUP_NUM_THREADS"
        " VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK"
        " VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE"
        " VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"
        " VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XLA_CHECK_RECOMPILATION"
    ),
}
"""Environment variables of vLLM that cannot change the KV, by reason."""

VLLM_SETTINGS: Final = ReviewedSettings(CLASSES_WITHOUT_KV, _FIELDS_WITHOUT_KV)
_VARIABLES: Final = frozenset(" ".join(VARIABLES_WITHOUT_KV.values()).split())

SAME_AT_ANY_LENGTH: Final = frozenset(
    {
        *("AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "BaichuanForCausalLM"),
        *("BambaForCausalLM", "BloomForCausalLM", "ChatGLMModel", "CohereForCausalLM"),
        *("Cohere2ForCausalLM", "DeepseekForCausalLM", "DeepseekV2ForCausalLM"),
        *("DeepseekV3ForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"),
        *("ExaoneForCausalLM", "Exaone4ForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM"),
        *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GlmForCausalLM"),
        *("Glm4ForCausalLM", "Glm4MoeForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM"),
        *("GPTJForCausalLM", "GPTNeoXForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM"),
        *("GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "InternLM2ForCausalLM"),
        *("InternLM3ForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM", "LlamaForCausalLM"),
        *("MistralForCausalLM", "MixtralForCausalLM", "MPTForCausalLM", "NemotronForCausalLM"),
        *("NemotronHForCausalLM", "OLMoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        *("OlmoForCausalLM", "OlmoeForCausalLM", "OPTForCausalLM", "OrionForCausalLM"),
        *("PhiForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
        *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"),
        *("SeedOssForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM"),
        *("Starcoder2ForCausalLM", "Zamba2ForCausalLM"),
    }
)
"""Architectures whose code in vLLM reads neither `max_model_len` nor the generation config."""
STATIC_ROPES: Final = frozenset(
    {"deepseek_llama_scaling", "deepseek_yarn", "default", "linear", "llama3", "mrope", "yarn"}
)
"""Kinds of rotary embedding that rotate a position equally whatever the longest prompt is."""


def set_variables(known: Iterable[str]) -> dict[str, str]:
    """Return those of the environment variables that vLLM knows that are set."""
    return {name: os.environ[name] for name in known if name in os.environ}


def settings_fingerprint(vllm_config: Any, variables: Mapping[str, str]) -> str:
    """Return text that differs if any setting differs that may change the KV of equal tokens.

    Args:
        vllm_config: vLLM's configuration, without the settings of drafts, adapters and multimodal
            contents.
        variables: The environment variables that vLLM knows and that are set.

    Raises:
        LayoutError: A setting has a value that no text can name.
    """
    facts = {
        "settings": VLLM_SETTINGS.named(vllm_config, "vllm_config"),
        "length": length_facts(vllm_config.model_config),
        "variables": {n: value for n, value in variables.items() if n not in _VARIABLES},
    }
    return digest_of(facts)


def length_facts(model_config: Any) -> Any:
    """Return what of the longest allowed prompt and of the generation config changes the KV.

    vLLM's models read both while they are built: longrope takes one of two tables by the longest
    prompt, Llama 4 scales attention by it, or by the generation config.
    """
    if not _depends_on_length(model_config.hf_config):
        return None
    read = getattr(model_config, "try_get_generation_config", dict)
    return [
        getattr(model_config, "max_model_len", None),
        VLLM_SETTINGS.named(
            getattr(model_config, "override_generation_config", None), "generation"
        ),
        VLLM_SETTINGS.named(read(), "generation_config"),
    ]


def _depends_on_length(hf_config: Any) -> bool:
    options = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    architectures = options.get("architectures") or ()
    is_known = bool(architectures) and SAME_AT_ANY_LENGTH.issuperset(architectures)
    return not is_known or not STATIC_ROPES.issuperset(_rope_kinds(options))


def _rope_kinds(options: Any) -> set[str]:
    """Return the kinds of rotary embedding that are named anywhere in a configuration."""
    if isinstance(options, Mapping):
        kinds = set().union(*map(_rope_kinds, options.values()))
        scaling = options.get("rope_scaling")
        if isinstance(scaling, Mapping) and "rope_type" not in scaling:
            kinds.add(str(scaling.get("type")))
        if "rope_type" in options:
            kinds.add(str(options["rope_type"]))
        return kinds
    if isinstance(options, list | tuple):
        return set().union(*map(_rope_kinds, options))
    return set()
