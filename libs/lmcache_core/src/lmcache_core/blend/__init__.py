"""Blending: reuse of chunks that are not a prefix. Needs torch.

Names are resolved on first use, as in all packages that a process without torch may import.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.blend.executor import CacheBlendImpl
    from lmcache_core.blend.interfaces import (
        BlendExecutor,
        BlendOutput,
        BlendRetriever,
        BlendRetrieverResult,
        BlendRetrieverTask,
        create_index,
        indices_to_mask,
        mask_to_indices,
    )
    from lmcache_core.blend.retriever import SPTBlendRetriever, SPTBlendRetrieverTask
    from lmcache_core.blend.rotary import RopeParameters, RotaryEmbedding

_RESOLVED_LATER = MappingProxyType(
    {
        "BlendExecutor": "interfaces",
        "BlendOutput": "interfaces",
        "BlendRetriever": "interfaces",
        "BlendRetrieverResult": "interfaces",
        "BlendRetrieverTask": "interfaces",
        "CacheBlendImpl": "executor",
        "RopeParameters": "rotary",
        "RotaryEmbedding": "rotary",
        "SPTBlendRetriever": "retriever",
        "SPTBlendRetrieverTask": "retriever",
        "create_index": "interfaces",
        "indices_to_mask": "interfaces",
        "mask_to_indices": "interfaces",
    }
)

__all__ = [
    "BlendExecutor",
    "BlendOutput",
    "BlendRetriever",
    "BlendRetrieverResult",
    "BlendRetrieverTask",
    "CacheBlendImpl",
    "RopeParameters",
    "RotaryEmbedding",
    "SPTBlendRetriever",
    "SPTBlendRetrieverTask",
    "create_index",
    "indices_to_mask",
    "mask_to_indices",
]


def __getattr__(name: str) -> Any:
    if name in _RESOLVED_LATER:
        return getattr(importlib.import_module(f"{__name__}.{_RESOLVED_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
