"""Describes the KV that an engine or a memory pool handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

KV_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""Names of the dtypes of KV: those whose size `lmcache_core.memory.dtypes` knows."""


@dataclass(frozen=True)
class LMCacheEngineMetadata:
    """Describes the KV. The first six are the documented fields; the others are also part of the
    identity.

    Attributes:
        model_name: Model, as named by the serving engine.
        world_size: Number of workers.
        fmt: KV format of the serving engine, "vllm" or "huggingface".
        kv_dtype: `torch.dtype` or its name.
        kv_shape: `(num_layers, 2, chunk_size, num_kv_heads, head_size)`; 1 instead of 2 if keys and
            values are one.
        revision: Revision of the weights.
        adapter: Name and revision of the LoRA adapter, "" for none.
        layout: Physical layout, if `kv_shape` does not determine it.

    Raises:
        ConfigError: The worker or the KV shape is invalid.
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

    def __post_init__(self) -> None:
        if not _is_whole(self.world_size, 1):
            raise ConfigError(
                f"world_size={self.world_size!r}: must be a whole number from 1, the number of"
                " workers"
            )
        if not _is_whole(self.worker_id, 0) or self.worker_id >= self.world_size:
            raise ConfigError(
                f"worker_id={self.worker_id!r}: must be a whole number in 0 …"
                f" {self.world_size - 1}, as world_size says"
            )
        if self.kv_dtype_name not in KV_DTYPES:
            raise ConfigError(
                f"kv_dtype={self.kv_dtype!r}: must be a torch.dtype or its name, one of"
                f" {', '.join(KV_DTYPES)}"
            )
        shape = self.kv_shape
        if len(shape) != 5 or not all(_is_whole(n, 1) for n in shape) or shape[1] > 2:
            raise ConfigError(
                f"kv_shape={shape!r}: must be (num_layers, sides, chunk_size, num_kv_heads,"
                " head_size), five whole numbers from 1; sides is 2 for keys and values, 1 where"
                " they are one"
            )

    @property
    def kv_dtype_name(self) -> str:
        """Name of the KV dtype without a module, for example "bfloat16"."""
        return dtype_name_of(self.kv_dtype)

    def layout_fingerprint(self) -> str:
        """Return a text that differs if the bytes of a chunk mean something else: sides, layers,
        heads, head size, layout.
        """
        layers, sides, _, heads, head_size = self.kv_shape
        return f"KV_BLOB/1;layers={layers};sides={sides};heads={heads};head_size={head_size};{self.layout}"  # noqa: E501


@dataclass(frozen=True)
class LMCacheMemPoolMetadata:
    """Describes the content of a memory pool.

    Attributes:
        kv_shape: Shape of the KV of one whole chunk, for example `(num_layers, 2, chunk_size,
            num_kv_heads, head_size)`.
        kv_dtype: `torch.dtype` or its name.
        max_local_cache_size: Size of the pool, GB (2^30 bytes).
    """

    kv_shape: tuple[int, ...]
    kv_dtype: torch.dtype | str
    max_local_cache_size: float

    @property
    def kv_dtype_name(self) -> str:
        """Name of the KV dtype without a module, for example "bfloat16"."""
        return dtype_name_of(self.kv_dtype)


def dtype_name_of(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype, given as a dtype or a name."""
    return str(dtype).removeprefix("torch.")


def _is_whole(number: object, low: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= low
