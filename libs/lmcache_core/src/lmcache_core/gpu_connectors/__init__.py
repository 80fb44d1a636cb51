"""GPU connectors: copy between a serving engine's KV and memory objects. Needs torch.

Connectors for paged memory also need the package lmcache_kernels (extra `kernels`), which is
resolved on first use.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.extras import needs_extra

with needs_extra("torch", "torch", "numpy"):
    from lmcache_core.gpu_connectors.base import GPUConnectorInterface
    from lmcache_core.gpu_connectors.layout import KVLayout, LayerGroup, Order, Packing
    from lmcache_core.gpu_connectors.nested_tuple import VLLMNestedTupleGPUConnector

if TYPE_CHECKING:
    from lmcache_core.gpu_connectors.canary import run_canary
    from lmcache_core.gpu_connectors.engine_memory import EngineMemory, LogicalMemory
    from lmcache_core.gpu_connectors.paged import (
        PagedConnector,
        PagedGPUConnector,
        VLLMPagedMemGPUConnector,
        VLLMPagedMemGPUConnectorV2,
    )

_NEEDS_KERNELS = MappingProxyType(
    {
        "EngineMemory": "engine_memory",
        "LogicalMemory": "engine_memory",
        "PagedConnector": "paged",
        "PagedGPUConnector": "paged",
        "VLLMPagedMemGPUConnector": "paged",
        "VLLMPagedMemGPUConnectorV2": "paged",
        "run_canary": "canary",
    }
)

__all__ = [
    "EngineMemory",
    "GPUConnectorInterface",
    "KVLayout",
    "LayerGroup",
    "LogicalMemory",
    "Order",
    "Packing",
    "PagedConnector",
    "PagedGPUConnector",
    "VLLMNestedTupleGPUConnector",
    "VLLMPagedMemGPUConnector",
    "VLLMPagedMemGPUConnectorV2",
    "run_canary",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_KERNELS:
        with needs_extra("kernels", "lmcache_kernels"):
            return getattr(importlib.import_module(f"{__name__}.{_NEEDS_KERNELS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
