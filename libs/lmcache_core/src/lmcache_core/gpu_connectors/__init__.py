"""GPU connectors: copy between a serving engine's KV and memory objects. Needs torch.

Connectors for paged memory also need the package lmcache_kernels (extra `kernels`), which is
resolved on first use.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.extras import needs_extra, resolve

with needs_extra("torch"):
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
        "EngineMemory": "gpu_connectors.engine_memory",
        "LogicalMemory": "gpu_connectors.engine_memory",
        "PagedConnector": "gpu_connectors.paged",
        "PagedGPUConnector": "gpu_connectors.paged",
        "VLLMPagedMemGPUConnector": "gpu_connectors.paged",
        "VLLMPagedMemGPUConnectorV2": "gpu_connectors.paged",
        "run_canary": "gpu_connectors.canary",
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
    return resolve(__name__, _NEEDS_KERNELS, name)
