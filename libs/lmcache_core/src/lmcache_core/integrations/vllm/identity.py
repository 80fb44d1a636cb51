"""Identifies the KV of a vLLM engine: model, weights, layout, ranks."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.options import BLOCKS, ConnectorOptions
from lmcache_core.integrations.vllm.weights import model_fingerprint, options_fingerprint

FMT = "vllm"

FILE_FORMATS = frozenset(
    {
        *("auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral"),
        *("npcache", "pt", "runai_streamer", "runai_streamer_sharded", "safetensors"),
        "sharded_state",
    }
)
"""vLLM's load formats that read the model's own files. Others get weights from elsewhere."""

DRAFTS_WITHOUT_KV = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})
"""vLLM's speculative methods that add no layer to the KV cache."""

_CONTENT_OPTIONS = (
    *("mm_processor_kwargs", "media_io_kwargs", "mm_encoder_attn_dtype"),
    *("mm_encoder_fp8_scale_path", "video_pruning_rate", "video_pruning_method"),
)
_CONTENT_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""How a model processes multimodal contents affects their KV, and is not part of vLLM's name of
them.
"""


@dataclass(frozen=True)
class KVIdentity:
    """Describes the KV; the same in all processes of an engine.

    Attributes:
        metadata: Input to the root of the chain of chunk hashes; its shape is that of the first
            group on one worker.
        num_ranks: Number of workers whose KV of a token differs.
        replicas: Neighbouring workers that hold the same bytes; the first of them stores.
        contents: Other settings that affect the KV of multimodal contents, see
            `contents_fingerprint`.
    """

    metadata: LMCacheEngineMetadata
    num_ranks: int
    replicas: int
    contents: str | None = ""

    def rank_of(self, worker_rank: int) -> int:
        """Return the KV rank of a worker."""
        return worker_rank // self.replicas

    def stores(self, worker_rank: int) -> bool:
        """Return whether that worker stores on behalf of all that hold the same KV."""
        return worker_rank % self.replicas == 0


def identity_of(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[CacheGroup],
    options: ConnectorOptions,
    release: str,
    *,
    is_worker: bool = False,
) -> KVIdentity:
    """Describe the KV of an engine.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's cache groups.
        groups: The groups that are cached.
        options: Options.
        release: vLLM's version and the type of GPU.
        is_worker: Leave the weights out: only the scheduler's side names chunks, so that one
            process per engine reads the weights.

    Raises:
        LayoutError: The KV depends on more than tokens and weights, the weights are unknown, or the
            KV is distributed over workers in an unsupported way.
    """
    check_shareable(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(
                f"{name}={getattr(parallel, name)}: KV that is split over workers by token cannot"
                " be cached"
            )
    # Workers that hold the same KV: with latent attention (MLA), all of them. Newer releases state
    # the number, also if there are fewer heads than workers.
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is None:
        replicas = parallel.tensor_parallel_size if getattr(model, "use_mla", False) else 1
    if any(group.is_state for group in groups):
        replicas = 1  # each worker has the state of its own heads
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size // replicas
    first = next((group for group in groups if not group.is_state), groups[0])
    heads, size = getattr(first.spec, "num_kv_heads", 1), getattr(first.spec, "head_size", 0)
    shape = (len(first.layers), 2, options.engine.chunk_size, heads, size)
    metadata = LMCacheEngineMetadata(
        options.model_name or shared_name(model.model),
        num_ranks,
        0,
        FMT,
        str(getattr(first.spec, "dtype", "uint8")),
        shape,
        revision="" if is_worker else revision_text(vllm_config, options.revision),
        layout=_layout_text(vllm_config, kv_cache_config, groups, options, release),
    )
    return KVIdentity(metadata, num_ranks, int(replicas), contents_fingerprint(vllm_config))


def check_shareable(vllm_config: Any) -> None:
    """Refuse an engine whose KV other engines cannot use.

    Raises:
        LayoutError: The KV depends on more than tokens and weights, or parts of it are on other
            nodes.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # vLLM's own prefix cache is off then, but it would still load ours.
    if not getattr(model, "is_prefix_caching_supported", True):
        raise LayoutError(
            "vLLM says that this model needs every token of a prompt computed (to pool over all of"
            " them, for example)"
        )
    num_nodes = getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1))
    if num_nodes > 1:
        raise LayoutError(
            f"the workers of one engine are on {num_nodes} nodes: each node's sidecar would hold a"
            " part of each chunk"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(
            "calculate_kv_scales: the scales of quantised KV then depend on what an engine saw"
            " first, so it cannot be shared"
        )


def shared_name(model: str) -> str:
    """Return the name under which a model's KV is shared: of a path, the folder's own name, so that
    copies of the weights at two paths share KV.
    """
    is_path = model.startswith(("/", ".", "~"))
    return model.rstrip("/").rsplit("/", 1)[-1] if is_path else model


def contents_fingerprint(vllm_config: Any) -> str | None:
    """Return text that differs if the same content is converted to other numbers; None if contents
    have no names of their own.

    If vLLM caches neither prompts nor contents, it just numbers the contents. Every process counts
    from one, so another picture has the same number elsewhere.

    Args:
        vllm_config: vLLM's configuration.

    Returns:
        "" for a model that takes only text.
    """
    model = vllm_config.model_config
    options = getattr(model, "multimodal_config", None)
    if options is None:
        return ""
    if (
        getattr(options, "mm_processor_cache_gb", None) == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        return None
    facts = {name: getattr(options, name, None) for name in _CONTENT_OPTIONS}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name in _CONTENT_FILES:
        file = Path(model.model, name)
        if file.is_file():
            digest.update(f"\0{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def revision_text(vllm_config: Any, revision: str | None) -> str:
    """Return everything else that affects the KV of these tokens: the weights and how they are
    used.
    """
    model, draft = vllm_config.model_config, getattr(vllm_config, "speculative_config", None)
    load = getattr(vllm_config, "load_config", None)
    load_format: str = getattr(load, "load_format", "auto")
    is_dummy = load_format == "dummy"
    weights = revision or ("" if is_dummy else None)
    is_own = load_format in FILE_FORMATS and not getattr(model, "model_weights", None)
    if weights is None and is_own:
        has_own_config = getattr(model, "hf_config_path", None) in (None, model.model)
        config = model.hf_config if has_own_config else None
        weights = model_fingerprint(
            model.model, model.revision, config, getattr(load, "download_dir", None)
        )
    if weights is None:
        raise LayoutError(
            f'the weights of {model.model} cannot be identified: name them with "lmcache.revision"'
        )
    facts = {
        "weights": weights,
        "options": options_fingerprint(model.hf_config),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "dummy": model.seed if is_dummy else "",
        "draft": "",
    }
    if draft is not None and getattr(draft, "method", None) not in DRAFTS_WITHOUT_KV:
        facts["draft"] = f"{getattr(draft, 'method', '')}:{getattr(draft, 'model', '')}"
    return ";".join(f"{name}={value}" for name, value in facts.items())


def _layout_text(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[CacheGroup],
    options: ConnectorOptions,
    release: str,
) -> str:
    """Return text that differs if a chunk's bytes mean something else."""
    parallel = vllm_config.parallel_config
    partition = (
        os.environ.get("VLLM_PP_LAYER_PARTITION", "") if parallel.pipeline_parallel_size > 1 else ""
    )
    facts = {
        "groups": "|".join(group.describe() for group in groups),
        "tp": parallel.tensor_parallel_size,
        "pp": f"{parallel.pipeline_parallel_size}:{partition}",
        "kv": vllm_config.cache_config.cache_dtype,
        "blocks": "",
    }
    if options.layout == BLOCKS or any(group.is_state for group in groups):
        facts["blocks"] = block_text(vllm_config, kv_cache_config, release)
    text = ";".join(f"{name}={value}" for name, value in facts.items())
    return f"vllm/1;{options.layout};{hashlib.sha256(text.encode()).hexdigest()}"


def block_text(vllm_config: Any, kv_cache_config: Any, release: str) -> str:
    """Return what determines the inside of a block that only vLLM can read, as far as all its
    processes know it.

    That is its release, the machine's instruction set, and the layout and backend requested. The
    backend that vLLM chooses by itself is known only to a worker: it is in the records of its
    chunks (`memory_of`).
    """
    cpu = f"{torch.backends.cpu.get_cpu_capability()},amx={torch.cpu._is_amx_tile_supported()}"
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or os.environ.get(
        "VLLM_KV_CACHE_LAYOUT"
    )
    backend = getattr(
        getattr(vllm_config, "attention_config", None), "backend", None
    ) or os.environ.get("VLLM_ATTENTION_BACKEND")
    return f"{release};{platform.machine()};{cpu};layout={layout};backend={backend}"
