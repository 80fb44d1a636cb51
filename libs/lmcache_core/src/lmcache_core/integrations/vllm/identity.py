"""Identifies the KV of a vLLM engine: model, weights, layout, ranks."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.kv_settings import VLLM_SETTINGS, settings_fingerprint
from lmcache_core.integrations.vllm.options import BLOCKS, ConnectorOptions
from lmcache_core.integrations.weights import model_fingerprint, shared_name

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

_CONTENT_FILES = "*process*.json"
"""How a model processes multimodal contents; not part of vLLM's names of them."""


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
        adapters: Text that differs if the same files of an adapter are applied differently.
    """

    metadata: LMCacheEngineMetadata
    num_ranks: int
    replicas: int
    contents: str | None = ""
    adapters: str = ""

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
    variables: Mapping[str, str],
    *,
    is_worker: bool = False,
) -> KVIdentity:
    """Describe the KV of an engine.

    Args:
        release: vLLM's version and the type of GPU.
        variables: The environment variables that vLLM knows and that are set.
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
        revision="" if is_worker else revision_text(vllm_config, options.revision, variables),
        layout=_layout_text(vllm_config, kv_cache_config, groups, options, release),
    )
    return KVIdentity(
        metadata,
        num_ranks,
        int(replicas),
        contents_fingerprint(vllm_config),
        VLLM_SETTINGS.fingerprint(getattr(vllm_config, "lora_config", None), "lora_config"),
    )


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
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise LayoutError("weight_transfer_config: the weights may change while the engine runs")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(
            "calculate_kv_scales: the scales of quantised KV then depend on what an engine saw"
            " first, so it cannot be shared"
        )


def contents_fingerprint(vllm_config: Any) -> str | None:
    """Return text that differs if the same content is converted to other numbers; None if contents
    have no names of their own.

    If vLLM caches neither prompts nor contents, it just numbers the contents. Every process counts
    from one, so another picture has the same number elsewhere.

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
    facts = VLLM_SETTINGS.fingerprint(options, "multimodal_config")
    digest = hashlib.sha256(facts.encode())
    scales = getattr(options, "mm_encoder_fp8_scale_path", None)
    files = [*sorted(Path(model.model).glob(_CONTENT_FILES)), *([Path(scales)] if scales else [])]
    for file in files:
        if file.is_file():
            digest.update(f"\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def revision_text(vllm_config: Any, revision: str | None, variables: Mapping[str, str]) -> str:
    """Return everything else that affects the KV of these tokens: the weights and how they are
    used.

    Args:
        revision: The name that a user gives the weights; None: that of their content.
        variables: The environment variables that vLLM knows and that are set.

    Raises:
        LayoutError: The weights, or a setting, cannot be named.
    """
    model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    is_dummy = getattr(load, "load_format", "auto") == "dummy"
    weights = revision or ("" if is_dummy else _weights_text(model, load))
    if weights is None:
        raise LayoutError(
            f'the weights of {model.model} cannot be identified: name them with "lmcache.revision"'
        )
    facts = {
        "weights": weights,
        "dummy": model.seed if is_dummy else "",
        "settings": settings_fingerprint(vllm_config, variables),
        "draft": _draft_text(getattr(vllm_config, "speculative_config", None), load),
    }
    return ";".join(f"{name}={value}" for name, value in facts.items())


def _weights_text(model: Any, load: Any) -> str | None:
    if getattr(load, "load_format", "auto") not in FILE_FORMATS:
        return None
    if getattr(model, "model_weights", None):
        return None
    has_own_config = getattr(model, "hf_config_path", None) in (None, model.model)
    config = model.hf_config if has_own_config else None
    folder = getattr(load, "download_dir", None)
    return model_fingerprint(model.model, getattr(model, "revision", None), config, folder)


def _draft_text(draft: Any, load: Any) -> str:
    """Return text that differs if a draft model has other KV; "" if it has none."""
    if draft is None or getattr(draft, "method", None) in DRAFTS_WITHOUT_KV:
        return ""
    model = getattr(draft, "draft_model_config", None)
    load = getattr(draft, "draft_load_config", None) or load
    weights = None if model is None else _weights_text(model, load)
    # Other KV of drafts costs accepted tokens, not right answers: a path is name enough for
    # weights that cannot be read.
    if weights is None:
        weights = f"{getattr(draft, 'model', '')}@{getattr(draft, 'revision', '')}"
    return f"{weights}:{VLLM_SETTINGS.fingerprint(draft, 'speculative_config')}"


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
