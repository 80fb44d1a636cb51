"""Tiers that store chunks. Implementations are imported on first use."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend

if TYPE_CHECKING:
    from lmcache_core.documented.disk import LocalDiskBackend
    from lmcache_core.documented.tensor_backend import LMCBackendInterface, StackTensorBackend
    from lmcache_core.storage.disk import DiskBackend
    from lmcache_core.storage.hot import LocalCPUBackend
    from lmcache_core.storage.manager import StorageManager

_LAZY = MappingProxyType(
    {
        "DiskBackend": "lmcache_core.storage.disk",
        "LMCBackendInterface": "lmcache_core.documented.tensor_backend",
        "LocalCPUBackend": "lmcache_core.storage.hot",
        "LocalDiskBackend": "lmcache_core.documented.disk",
        "StackTensorBackend": "lmcache_core.documented.tensor_backend",
        "StorageManager": "lmcache_core.storage.manager",
    }
)

__all__ = [
    "Allocate",
    "Chunk",
    "DiskBackend",
    "LMCBackendInterface",
    "LocalCPUBackend",
    "LocalDiskBackend",
    "Miss",
    "MissReason",
    "Result",
    "StackTensorBackend",
    "StorageBackend",
    "StorageManager",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
