"""Blending: reuse of chunks that are not a prefix. Needs torch.

Names are resolved on first use, as in all packages that a process without torch may import.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.extras import resolve

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
        "BlendExecutor": "blend.interfaces",
        "BlendOutput": "blend.interfaces",
        "BlendRetriever": "blend.interfaces",
        "BlendRetrieverResult": "blend.interfaces",
        "BlendRetrieverTask": "blend.interfaces",
        "CacheBlendImpl": "blend.executor",
        "RopeParameters": "blend.rotary",
        "RotaryEmbedding": "blend.rotary",
        "SPTBlendRetriever": "blend.retriever",
        "SPTBlendRetrieverTask": "blend.retriever",
        "create_index": "blend.interfaces",
        "indices_to_mask": "blend.interfaces",
        "mask_to_indices": "blend.interfaces",
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
    return resolve(__name__, _RESOLVED_LATER, name)
