"""GPU connectors: between a serving engine's KV and memory objects. Needs torch.

The connectors for paged memory also need the package lmcache_kernels (extra `kernels`); they are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.gpu_connectors.nested_tuple import VLLMNestedTupleGPUConnector

if TYPE_CHECKING:
    from lmcache_core.gpu_connectors.paged import VLLMPagedMemGPUConnector

_NEEDS_KERNELS = {"VLLMPagedMemGPUConnector": "lmcache_core.gpu_connectors.paged"}

__all__ = ["GPUConnectorInterface", "VLLMNestedTupleGPUConnector", "VLLMPagedMemGPUConnector"]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_KERNELS:
        return getattr(importlib.import_module(_NEEDS_KERNELS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
