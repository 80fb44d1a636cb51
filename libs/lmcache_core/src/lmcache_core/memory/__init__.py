"""Memory for chunks: formats, reference-counted objects, allocators, arenas, pools.

Allocators are resolved on first use: a serving process that only fills the sidecar's arena needs
none of them, and a process without torch can import this package.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.extras import resolve
from lmcache_core.memory.base import (
    FreeBlock,
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
)
from lmcache_core.memory.buffer import BufferAllocator, BytesBufferMemoryObj
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name, num_bytes
from lmcache_core.memory.shared import SharedArena, attach_shared_arena

if TYPE_CHECKING:
    from lmcache_core.documented.mixed_allocator import MixedMemoryAllocator
    from lmcache_core.documented.pools import (
        BasePool,
        KVObj,
        LocalCPUBufferPool,
        LocalCPUPool,
        LocalGPUPool,
        LocalPool,
    )
    from lmcache_core.memory.arena import ArenaAllocator, ArenaMemoryObj
    from lmcache_core.memory.free_list import ALIGN_BYTES, FreeList
    from lmcache_core.memory.tensor import (
        GPUMemoryAllocator,
        HostMemoryAllocator,
        PinMemoryAllocator,
        TensorMemoryAllocator,
        TensorMemoryObj,
    )

_RESOLVED_LATER = MappingProxyType(
    {
        "ALIGN_BYTES": "memory.free_list",
        "ArenaAllocator": "memory.arena",
        "ArenaMemoryObj": "memory.arena",
        "BasePool": "documented.pools",
        "FreeList": "memory.free_list",
        "GPUMemoryAllocator": "memory.tensor",
        "HostMemoryAllocator": "memory.tensor",
        "KVObj": "documented.pools",
        "LocalCPUBufferPool": "documented.pools",
        "LocalCPUPool": "documented.pools",
        "LocalGPUPool": "documented.pools",
        "LocalPool": "documented.pools",
        "MixedMemoryAllocator": "documented.mixed_allocator",
        "PinMemoryAllocator": "memory.tensor",
        "TensorMemoryAllocator": "memory.tensor",
        "TensorMemoryObj": "memory.tensor",
    }
)

__all__ = [
    "ALIGN_BYTES",
    "ArenaAllocator",
    "ArenaMemoryObj",
    "BasePool",
    "BufferAllocator",
    "BytesBufferMemoryObj",
    "DTYPE_ITEMSIZE",
    "FreeBlock",
    "FreeList",
    "GPUMemoryAllocator",
    "HostMemoryAllocator",
    "KVObj",
    "LocalCPUBufferPool",
    "LocalCPUPool",
    "LocalGPUPool",
    "LocalPool",
    "MemoryAllocatorInterface",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "MixedMemoryAllocator",
    "PinMemoryAllocator",
    "SharedArena",
    "TensorMemoryAllocator",
    "TensorMemoryObj",
    "attach_shared_arena",
    "dtype_name",
    "num_bytes",
]


def __getattr__(name: str) -> Any:
    return resolve(__name__, _RESOLVED_LATER, name)
