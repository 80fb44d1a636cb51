"""Names and sizes of KV dtypes. Names are torch's, without the module; torch is not needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType

DTYPE_ITEMSIZE = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype given as `torch.dtype` or as its name.

    Raises:
        ValueError: Not a dtype of `DTYPE_ITEMSIZE`.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_ITEMSIZE:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPE_ITEMSIZE)}")
    return name


def num_bytes(shape: Sequence[int], dtype: object) -> int:
    """Return the size in bytes of a contiguous tensor of that shape and dtype."""
    return math.prod(shape) * _itemsize(dtype)


@cache  # formatting a torch dtype takes longer than everything else
def _itemsize(dtype: object) -> int:
    return DTYPE_ITEMSIZE[dtype_name(dtype)]
