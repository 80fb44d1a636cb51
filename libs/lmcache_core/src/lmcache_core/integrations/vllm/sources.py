"""Where a hit came from, in vLLM's words (0.32 and later)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from lmcache_core.record import StagedFrom

_MODULE = "vllm.v1.metrics.cache_hit_source"
_NAMES: Mapping[int, str] = {
    StagedFrom.HOT: "HOST",
    StagedFrom.DISK: "DISK",
    StagedFrom.PEER: "P2P",
}


def _sources() -> Any:
    return (
        importlib.import_module(_MODULE).CacheHitSource
        if importlib.util.find_spec(_MODULE) is not None
        else None
    )


HIT_SOURCE = getattr(_sources(), "HOST", None)
"""What hits are unless they are told apart."""


def hit_sources(origins: Mapping[int, int]) -> dict[Any, int]:
    """Tokens by vLLM's source, from tokens by `StagedFrom`; a value of a later sidecar's is a
    source of no name.
    """
    counts: dict[Any, int] = {}
    for origin, num_tokens in origins.items():
        source = getattr(_sources(), _NAMES.get(origin, "EXTERNAL_UNSPECIFIED"))
        counts[source] = counts.get(source, 0) + num_tokens
    return counts
