"""What the KV of a vLLM engine is: model, weights, layout, ranks; and the root of a request's
chunk names.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.adapters import Adapters
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.options import BLOCKS, ConnectorOptions
from lmcache_core.integrations.vllm.weights import model_fingerprint, options_fingerprint
from lmcache_core.token_database.hashing import identity_root

FMT = "vllm"
ROOT_APART = b"lmcache/vllm-root/1"

FILE_FORMATS = frozenset(
    {
        *("auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral"),
        *(
            "npcache",
            "pt",
            "runai_streamer",
            "runai_streamer_sharded",
            "safetensors",
            "sharded_state",
        ),
    }
)
"""vLLM's load formats that read the model's own files. Others take weights from somewhere else."""

_CONTENT_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
_CONTENT_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What multimodal contents become for a model decides about their KV, and is no part of what vLLM
calls them.
"""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class KVIdentity:
    """What the KV is, the same in all processes of an engine.

    Attributes:
        metadata: For the root of the chain of chunk hashes; its shape is that of the first group on
            one worker.
        num_ranks: Workers whose KV of a token differs.
        replicas: Neighbouring workers that hold the same bytes; the first of them stores.
        contents: What else decides about the KV of multimodal contents, see `contents_fingerprint`.
    """

    metadata: LMCacheEngineMetadata
    num_ranks: int
    replicas: int
    contents: str | None = ""

    def rank_of(self, worker_rank: int) -> int:
        """Which KV a worker has."""
        return worker_rank // self.replicas

    def stores(self, worker_rank: int) -> bool:
        """Whether that worker stores for all that hold the same."""
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
        groups: Those that are cached.
        options: Options.
        release: vLLM's version, and what GPU it runs on.
        is_worker: Leave the weights out: chunks are named by the scheduler's side alone, so that
            one process of an engine reads them.

    Raises:
        LayoutError: It depends on more than tokens and weights, or nothing tells which weights, or
            it is spread over workers in a way that is not supported.
    """
    model, parallel, cache = (
        vllm_config.model_config,
        vllm_config.parallel_config,
        vllm_config.cache_config,
    )
    if not getattr(
        model, "is_prefix_caching_supported", True
    ):  # vLLM's own prefix cache is then off, but it would load ours
        raise LayoutError(
            "vLLM says that this model needs every token of a prompt computed (to pool over all of"
            " them, for example)"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(
                f"{name}={getattr(parallel, name)}: KV that is spread over workers by token cannot"
                " be cached"
            )
    num_nodes = getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1))
    if num_nodes > 1:
        raise LayoutError(
            f"the workers of one engine are on {num_nodes} nodes: each node's sidecar would have a"
            " part of each chunk"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise LayoutError(
            "calculate_kv_scales: the scales of quantised KV then depend on what an engine saw"
            " first, so it cannot be shared"
        )
    replicas = _replicas(vllm_config, kv_cache_config)
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size // replicas
    spec = groups[0].spec
    shape = (len(groups[0].layers), 2, options.engine.chunk_size, spec.num_kv_heads, spec.head_size)
    metadata = LMCacheEngineMetadata(
        options.model_name or _short_name(model.model),
        num_ranks,
        0,
        FMT,
        str(spec.dtype),
        shape,
        revision="" if is_worker else _revision_text(vllm_config, options),
        layout=_layout_text(vllm_config, kv_cache_config, groups, options, release),
    )
    return KVIdentity(metadata, num_ranks, replicas, contents_fingerprint(vllm_config))


def contents_fingerprint(vllm_config: Any) -> str | None:
    """Text that differs where the same content becomes other numbers; None where contents have no
    names of their own.

    Where vLLM itself caches neither prompts nor contents, it only counts them. Every process counts
    anew, so another picture has that name elsewhere.

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


class Roots:
    """The root of the chunk names of a request: of its adapter and salt, and of the tenant's.

    Args:
        identity: What the KV is.

    Attributes:
        adapters: Names of adapters.
    """

    def __init__(self, identity: KVIdentity) -> None:
        self._metadata = identity.metadata
        self._salt: str | None = None
        self._epoch = ""
        self.adapters = Adapters()

    @property
    def version(self) -> tuple[str | None, str]:
        """Changes when roots do: names made under another version are to be made anew."""
        return self._salt, self._epoch

    def use_salt(self, salt: str) -> None:
        """The tenant's salt; nothing can be named before it is known."""
        self._salt = salt

    def begin_epoch(self) -> None:
        """The model computes other KV from now on (its weights have been replaced): nothing that
        was named before is found again.
        """
        self._epoch = secrets.token_hex(16)

    def root_of(self, request: Any) -> bytes | None:
        """The root for a vLLM request; None while the tenant's salt, or which weights its
        adapter has, is not known.
        """
        salt, adapter = self._salt, self.adapters.name_of(getattr(request, "lora_request", None))
        if salt is None or adapter is None:
            return None
        root = identity_root(replace(self._metadata, adapter=adapter), salt)
        cache_salt = getattr(request, "cache_salt", None) or ""
        return _root_apart(root, cache_salt, self._epoch) if cache_salt or self._epoch else root

    def base_root(self) -> bytes | None:
        """The root of requests without adapter and without a salt of their own."""
        return (
            None if self._salt is None or self._epoch else identity_root(self._metadata, self._salt)
        )


def _root_apart(root: bytes, cache_salt: str, epoch: str) -> bytes:
    """The root of requests that share only among themselves; the length before each field keeps it
    from reading as another one.

    Source: `docs/protocols.md`, "Identity".
    """
    digest = hashlib.sha256()
    for field in (
        ROOT_APART,
        root,
        cache_salt.encode("utf-8", "surrogatepass"),
        epoch.encode("ascii"),
    ):
        digest.update(_LENGTH.pack(len(field)) + field)
    return digest.digest()


def _replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Workers that hold the same KV: all those of a latent (MLA); newer releases say so, also
    where there are fewer heads than workers.
    """
    told = getattr(kv_cache_config, "kv_tp_replicas", None)
    if told is not None:
        return int(told)
    return (
        int(vllm_config.parallel_config.tensor_parallel_size)
        if getattr(vllm_config.model_config, "use_mla", False)
        else 1
    )


def _short_name(model: str) -> str:
    """The folder's own name, so that the same weights at two paths share; a hub's name is as it
    is.
    """
    return model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", ".", "~")) else model


def _revision_text(vllm_config: Any, options: ConnectorOptions) -> str:
    """What else decides about the KV of these tokens: weights, and all that is done with them."""
    model, draft = vllm_config.model_config, getattr(vllm_config, "speculative_config", None)
    is_dummy = getattr(getattr(vllm_config, "load_config", None), "load_format", "") == "dummy"
    weights = options.revision or ("" if is_dummy else _weights(vllm_config))
    if weights is None:
        raise LayoutError(
            f'nothing tells which weights {model.model} has: say so with "lmcache.revision"'
        )
    facts = {
        "weights": weights,
        "options": options_fingerprint(model.hf_config),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "dummy": model.seed if is_dummy else "",
        "draft": (
            "" if draft is None else f"{getattr(draft, 'method', '')}:{getattr(draft, 'model', '')}"
        ),
    }
    return ";".join(f"{name}={value}" for name, value in facts.items())


def _weights(vllm_config: Any) -> str | None:
    """What tells the weights; None where they come from elsewhere than the model's folder or
    hub.
    """
    model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    load_format: str = getattr(load, "load_format", "auto")
    if load_format not in FILE_FORMATS or getattr(model, "model_weights", None):
        return None
    has_own_config = getattr(model, "hf_config_path", None) in (None, model.model)
    config = model.hf_config if has_own_config else None
    return model_fingerprint(
        model.model, model.revision, config, getattr(load, "download_dir", None)
    )


def _layout_text(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[CacheGroup],
    options: ConnectorOptions,
    release: str,
) -> str:
    """What a chunk's bytes mean."""
    parallel = vllm_config.parallel_config
    partition = (
        os.environ.get("VLLM_PP_LAYER_PARTITION", "") if parallel.pipeline_parallel_size > 1 else ""
    )
    facts = {
        "groups": "|".join(group.describe() for group in groups),
        "tp": parallel.tensor_parallel_size,
        "pp": f"{parallel.pipeline_parallel_size}:{partition}",
        "kv": vllm_config.cache_config.cache_dtype,
        "blocks": (
            _block_text(vllm_config, kv_cache_config, release) if options.layout == BLOCKS else ""
        ),
    }
    text = ";".join(f"{name}={value}" for name, value in facts.items())
    return f"vllm/1;{options.layout};{hashlib.sha256(text.encode()).hexdigest()}"


def _block_text(vllm_config: Any, kv_cache_config: Any, release: str) -> str:
    """What decides about the inside of a block that only vLLM can read, as far as all its processes
    know.

    That is its release, the machine's instructions, and the layout and backend that were asked for.
    Which backend it has chosen by itself only a worker knows: that is in the records of its chunks
    (`memory_of`).
    """
    cpu = f"{torch.backends.cpu.get_cpu_capability()},amx={torch.cpu._is_amx_tile_supported()}"
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or os.environ.get(
        "VLLM_KV_CACHE_LAYOUT"
    )
    backend = getattr(
        getattr(vllm_config, "attention_config", None), "backend", None
    ) or os.environ.get("VLLM_ATTENTION_BACKEND")
    return f"{release};{platform.machine()};{cpu};layout={layout};backend={backend}"
