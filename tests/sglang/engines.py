"""SGLang engines, each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.vllm.processes import EngineProcess, Owner

PAGE_SIZE = 64
MAX_TOKENS = 40_000
"""Slots of an engine's pool."""
START_S = 400.0


def engine_options(model: Path, **options: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for a tiny model on a processor; `options` come on top."""
    common: dict[str, Any] = {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,
        "page_size": PAGE_SIZE,
        "max_total_tokens": MAX_TOKENS,
        "context_length": 4096,
        "chunked_prefill_size": 2048,
        "enable_cache_report": True,
        "log_level": "info",
        "random_seed": 1,
    }
    return common | options


LINKER = "lmcache_core.integrations.sglang:LMCacheLinker"


def linked(
    sidecar_socket: Path, linker: str = LINKER, tokens_per_s: float = 100.0
) -> dict[str, Any]:
    """The options that put our linker into an engine."""
    module, _, name = linker.partition(":")
    named = {"sidecar_socket": str(sidecar_socket), "prefill_tokens_per_s": tokens_per_s}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": name,
            "linker_module_path": module,
            "linker_extra_config": {f"lmcache.{key}": value for key, value in named.items()},
        },
    }


def start(
    owner: Owner, name: str, options: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> EngineProcess:
    """A running engine."""
    command = (sys.executable, "-m", "tests.sglang.engine_child")
    engine = owner.engine(name, {"OMP_NUM_THREADS": "1", **(environ or {})}, command)
    engine.open(options, timeout_s=START_S)
    return engine


def set_environment() -> None:
    """Set what makes engines quiet and offline, before torch is imported."""
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        del os.environ[name]
    for name in ("HF_HUB_OFFLINE", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")
