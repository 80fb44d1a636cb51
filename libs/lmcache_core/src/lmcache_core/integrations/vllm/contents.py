"""What multimodal contents become for a model: decides about their KV, and is no part of what
vLLM calls them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


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
    facts = {name: getattr(options, name, None) for name in _OPTIONS}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name in _FILES:
        file = Path(model.model, name)
        if file.is_file():
            digest.update(f"\0{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]
