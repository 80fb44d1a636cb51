"""Names SGLang's server arguments that may change the KV: all of them, except a reviewed list. A
listed one cannot change the KV of a token beyond the rounding by which GPUs and kernels differ
anyway, or is named elsewhere. Imports nothing of SGLang.

Source: `arg_groups/fields/` of SGLang 0.5.23.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from lmcache_core.integrations.reviewed_settings import ReviewedSettings

ALL_SETTINGS: Final = ReviewedSettings({}, {})

SETTINGS_WITHOUT_KV: Final[Mapping[str, str]] = {
    "named with the weights": (
        "download_dir load_format lora_paths model_path quantization_param_path revision"
        " weight_version"
    ),
    "named with the layout of ranks and pages": "page_size tp_size",
    "refused where they count": (
        "attn_cp_size custom_weight_loader dcp_size disaggregation_mode enable_unified_memory"
        " nnodes pp_size speculative_algorithm"
    ),
    "tokens are named, not texts": (
        "chat_template completion_template default_chat_template_kwargs hf_chat_template_name"
        " skip_tokenizer_init tokenizer_backend tokenizer_mode tokenizer_path"
        " trust_request_chat_template"
    ),
    "what clients may send and get": (
        "allow_auto_truncate enable_cache_report enable_custom_logit_processor"
        " enable_return_hidden_states enable_streaming_session file_storage_path"
        " incremental_streaming_output preferred_sampling_params reasoning_parser return_input_ids"
        " return_output_ids sampling_defaults served_model_name stream_interval"
        " stream_response_default_include_usage tool_call_parser tool_server"
    ),
    "which tokens are sampled": (
        "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt"
        " constrained_json_whitespace_pattern grammar_backend random_seed sampling_backend"
    ),
    "addresses, ports and keys": (
        "admin_api_key api_key disaggregation_bootstrap_port dist_init_addr dist_timeout"
        " encoder_bootstrap_port engine_info_bootstrap_port fastapi_root_path gated_launch_port"
        " grpc_mode grpc_port grpc_worker_threads host http2_initial_connection_window_size"
        " http2_max_concurrent_streams enable_http2 nccl_port port smg_grpc_mode"
        " smg_http_sidecar_port ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password"
        " enable_ssl_refresh"
    ),
    "which processes and devices do it": (
        "base_gpu_id custom_sigquit_handler detokenizer_worker_num dp_size gc_threshold gpu_id_step"
        " load_balance_method node_rank numa_node sleep_on_idle soft_watchdog_timeout"
        " skip_server_warmup tokenizer_worker_num use_ray warmups watchdog_timeout"
    ),
    "how much fits": (
        "max_queued_requests max_running_requests max_total_tokens mem_fraction_static"
        " num_reserved_decode_tokens"
    ),
    "how many tokens and requests a step takes, in which order": (
        "chunked_prefill_size default_priority_value disable_overlap_schedule"
        " enable_dynamic_chunking enable_mixed_chunk enable_priority_scheduling max_prefill_tokens"
        " num_continuous_decode_steps prefill_decode_interval prefill_max_requests"
        " retraction_policy schedule_conservativeness schedule_low_priority_values_first"
        " schedule_policy scheduler_recv_interval"
    ),
    "what SGLang's own caches keep and find": (
        "enable_session_radix_cache radix_eviction_policy radix_eviction_policy_config"
        " unified_cache_external_linker_backend unified_cache_external_linker_config"
    ),
    "logs, metrics and traces": (
        "bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token"
        " crash_dump_folder decode_log_interval enable_metrics enable_metrics_for_all_schedulers"
        " enable_mfu_metrics enable_request_time_stats_logging enable_trace export_metrics_to_file"
        " export_metrics_to_file_dir extra_metric_labels gc_warning_threshold_secs"
        " generation_tokens_buckets kv_events_config load_publish_endpoint"
        " load_snapshot_publish_interval log_level log_level_http log_requests log_requests_format"
        " log_requests_level log_requests_target otlp_service_name otlp_traces_endpoint"
        " prompt_tokens_buckets show_time_cost stat_loggers tokenizer_metrics_allowed_custom_labels"
        " tokenizer_metrics_custom_labels_header trace_modules"
        " uvicorn_access_log_exclude_prefixes"
    ),
    "how the same computation is captured": (
        "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode"
        " cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs_decode"
        " cuda_graph_max_bs_prefill disable_cuda_graph disable_cuda_graph_padding"
        " disable_decode_cuda_graph disable_prefill_cuda_graph enable_profile_cuda_graph"
    ),
}
"""Server arguments that cannot change the KV, by reason."""

VARIABLES: Final = frozenset({"SGLANG_RUN_ID"})
"""Environment variables of SGLang that cannot change the KV."""
_LISTED: Final = frozenset(" ".join(SETTINGS_WITHOUT_KV.values()).split())


def set_variables() -> dict[str, str]:
    """Return those of SGLang's environment variables that are set."""
    return {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}


def server_fingerprint(settings: Mapping[str, Any]) -> str:
    """Return text that differs if one of these server arguments does that may change the KV.

    Raises:
        LayoutError: One has a value that no text can name.
    """
    counted = {
        name: value for name, value in settings.items() if name not in _LISTED and value is not None
    }
    return ALL_SETTINGS.fingerprint(counted, "server_args")
