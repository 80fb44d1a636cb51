"""What the KV is that an engine or a memory pool handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LMCacheEngineMetadata:
    """What the KV is. The first six are the documented fields; the others are part of the identity too.

    Attributes:
        model_name: Model, as the serving engine names it.
        world_size: Number of workers.
        worker_id: This worker.
        fmt: KV format of the serving engine, "vllm" or "huggingface".
        kv_dtype: `torch.dtype` or its name.
        kv_shape: `(num_layers, 2, chunk_size, num_kv_heads, head_size)`.
        revision: Revision of the weights.
        adapter: Name and revision of the LoRA adapter, "" for none.
        layout: Physical layout where it is more than `kv_shape` says.
    """

    model_name: str
    world_size: int
    worker_id: int
    fmt: str
    kv_dtype: torch.dtype | str
    kv_shape: tuple[int, int, int, int, int]
    revision: str = ""
    adapter: str = ""
    layout: str = ""

    @property
    def kv_dtype_name(self) -> str:
        """Name of the KV dtype without a module, for example "bfloat16"."""
        return dtype_name_of(self.kv_dtype)

    def layout_fingerprint(self) -> str:
        """Text that differs whenever the bytes of a chunk mean something else: sides, layers, heads, head size, layout."""
        layers, sides, _, heads, head_size = self.kv_shape
        return f"KV_BLOB/1;layers={layers};sides={sides};heads={heads};head_size={head_size};{self.layout}"


@dataclass(frozen=True)
class LMCacheMemPoolMetadata:
    """What a memory pool holds.

    Attributes:
        kv_shape: Shape of the KV of one whole chunk, for example `(num_layers, 2, chunk_size, num_kv_heads, head_size)`.
        kv_dtype: `torch.dtype` or its name.
        max_local_cache_size: Room of the pool, GB (2^30 bytes).
    """

    kv_shape: tuple[int, ...]
    kv_dtype: torch.dtype | str
    max_local_cache_size: float

    @property
    def kv_dtype_name(self) -> str:
        """Name of the KV dtype without a module, for example "bfloat16"."""
        return dtype_name_of(self.kv_dtype)


def dtype_name_of(dtype: torch.dtype | str) -> str:
    """The name of a dtype, whether it came as one or as its name."""
    return str(dtype).removeprefix("torch.")
