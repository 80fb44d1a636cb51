"""Memory that holds chunks: formats, reference-counted objects, allocators, arenas.

Names that need torch are resolved on first use, so that a process without torch can import this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmcache_core.memory.arena import ArenaAllocator, ArenaMemoryObj
from lmcache_core.memory.base import (
    FreeBlock,
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
)
from lmcache_core.memory.buffer import BufferAllocator, BytesBufferMemoryObj
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name, num_bytes
from lmcache_core.memory.free_list import ALIGN_BYTES, FreeList
from lmcache_core.memory.shared import SharedArena, attach_shared_arena, create_shared_arena

if TYPE_CHECKING:
    from lmcache_core.memory.tensor import HostMemoryAllocator, TensorMemoryAllocator, TensorMemoryObj

_NEEDS_TORCH = dict.fromkeys(("HostMemoryAllocator", "TensorMemoryAllocator", "TensorMemoryObj"), "lmcache_core.memory.tensor")

__all__ = [
    "ALIGN_BYTES",
    "ArenaAllocator",
    "ArenaMemoryObj",
    "BufferAllocator",
    "BytesBufferMemoryObj",
    "DTYPE_ITEMSIZE",
    "FreeBlock",
    "FreeList",
    "HostMemoryAllocator",
    "MemoryAllocatorInterface",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "SharedArena",
    "TensorMemoryAllocator",
    "TensorMemoryObj",
    "attach_shared_arena",
    "create_shared_arena",
    "dtype_name",
    "num_bytes",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
