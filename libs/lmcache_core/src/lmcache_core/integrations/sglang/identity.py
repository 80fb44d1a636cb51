"""Identifies the KV of an SGLang engine: model, weights, settings, layout, ranks. Imports nothing
of SGLang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.reviewed_settings import digest_of
from lmcache_core.integrations.sglang.pools import Pool
from lmcache_core.integrations.sglang.server_settings import (
    ALL_SETTINGS,
    VARIABLES,
    server_fingerprint,
)
from lmcache_core.integrations.weights import (
    adapter_fingerprint,
    downloaded_folder,
    model_fingerprint,
    shared_name,
)

FMT = "sglang"
FILE_FORMATS = frozenset(
    {
        *("auto", "bitsandbytes", "fastsafetensors", "gguf", "layered", "mistral", "npcache"),
        *("pt", "runai_streamer", "safetensors", "sharded_state"),
    }
)
"""Load formats that read the model's own files. Others get weights from elsewhere."""
REFUSED: Mapping[str, tuple[Any, str]] = {
    "nnodes": (1, "each node's sidecar would hold a part of each page"),
    "pp_size": (1, "the ranks of a pipeline must agree on what is cached, which they do not"),
    "attn_cp_size": (1, "KV that is split over ranks by token cannot be cached"),
    "dcp_size": (1, "KV that is split over ranks by token cannot be cached"),
    "disaggregation_mode": ("null", "SGLang's own transfer moves the KV"),
    "speculative_algorithm": (None, "drafts have KV of their own"),
    "custom_weight_loader": ([], "the weights come from code"),
    "enable_unified_memory": (False, "the pools share memory"),
}
"""Settings that must have this value, and why."""


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks of the attention.

    Attributes:
        rank: This one's.
        size: Their number.
    """

    rank: int = 0
    size: int = 1


def identity_of(
    settings: Mapping[str, Any],
    model_config: Any,
    pool: Pool,
    ranks: Ranks,
    variables: Mapping[str, str],
    release: str,
    named: Mapping[str, str | None],
) -> LMCacheEngineMetadata:
    """Describe the KV of a rank.

    Args:
        settings: SGLang's server arguments, resolved.
        model_config: SGLang's `ModelConfig`.
        variables: SGLang's environment variables that are set.
        release: SGLang's version.
        named: The options `model_name`, under which KV is shared, by default the model's; and
            `revision`, the name of the weights, by default that of their content.

    Raises:
        LayoutError: The KV depends on more than tokens, weights and settings, or the weights are
            unknown.
    """
    for name, (value, why) in REFUSED.items():
        if settings.get(name, value) != value:
            raise LayoutError(f"{name}={settings[name]}: {why}")
    if getattr(model_config, "is_multimodal", False):
        raise LayoutError("the model takes pictures or sound, which SGLang names by 64 bits only")
    model = str(settings["model_path"])
    group = pool.layout.groups[0]
    facts = {
        "weights": named.get("revision") or _weights_text(settings, model_config),
        "settings": server_fingerprint(settings),
        "model": ALL_SETTINGS.fingerprint(model_config.hf_config, "hf_config"),
        "dtype": str(getattr(model_config, "dtype", "")),
        "adapters": _adapters_text(settings.get("lora_paths") or ()),
        "scales": _file_text(settings.get("quantization_param_path")),
        "variables": {
            name: value for name, value in sorted(variables.items()) if name not in VARIABLES
        },
    }
    num_ranks = 1 if pool.is_latent else ranks.size
    page_size = int(settings["page_size"])
    return LMCacheEngineMetadata(
        named.get("model_name") or shared_name(model),
        num_ranks,
        0 if pool.is_latent else ranks.rank,
        FMT,
        group.dtype,
        (pool.num_layers, group.sides, page_size, group.num_kv_heads, group.head_size),
        revision=digest_of(facts),
        layout=f"sglang/1;{release};page={page_size};tp={ranks.size};{pool.layout.fingerprint()}",
    )


def _weights_text(settings: Mapping[str, Any], model_config: Any) -> str:
    """Return the name of the weights by their content.

    Raises:
        LayoutError: They cannot be identified.
    """
    model, load_format = str(settings["model_path"]), settings.get("load_format", "auto")
    found = None
    if load_format in FILE_FORMATS:
        revision, folder = settings.get("revision"), settings.get("download_dir")
        found = model_fingerprint(model, revision, model_config.hf_config, folder)
    if found is None:
        raise LayoutError(
            f"the weights of {model} (load_format={load_format}) cannot be identified: name them"
            ' with "lmcache.revision"'
        )
    return found


def _adapters_text(adapters: Sequence[Any]) -> list[tuple[str, str]]:
    """Name the LoRA adapters of the start by content. Those that are loaded later have ids that no
    other engine has.
    """
    named = []
    for adapter in adapters:
        path = str(adapter["lora_path"] if isinstance(adapter, Mapping) else adapter.lora_path)
        name = str(adapter["lora_name"] if isinstance(adapter, Mapping) else adapter.lora_name)
        folder = Path(path) if Path(path).is_dir() else downloaded_folder(path)
        if folder is None:
            raise LayoutError(f"the files of the adapter {name} are not in {path}")
        named.append((name, adapter_fingerprint(folder)))
    return sorted(named)


def _file_text(path: str | None) -> str:
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
