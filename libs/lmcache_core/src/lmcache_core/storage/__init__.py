"""Tiers that store chunks. Implementations are imported on first use."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.extras import resolve
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend

if TYPE_CHECKING:
    from lmcache_core.documented.disk import LocalDiskBackend
    from lmcache_core.documented.tensor_backend import LMCBackendInterface
    from lmcache_core.storage.disk import DiskBackend
    from lmcache_core.storage.hot import LocalCPUBackend
    from lmcache_core.storage.manager import StorageManager

_LAZY = MappingProxyType(
    {
        "DiskBackend": "storage.disk",
        "LMCBackendInterface": "documented.tensor_backend",
        "LocalCPUBackend": "storage.hot",
        "LocalDiskBackend": "documented.disk",
        "StorageManager": "storage.manager",
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
    "StorageBackend",
    "StorageManager",
]


def __getattr__(name: str) -> Any:
    return resolve(__name__, _LAZY, name)
