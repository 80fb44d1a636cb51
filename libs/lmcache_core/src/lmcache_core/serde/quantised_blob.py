"""The bytes of a quantised tensor: the arrays of its blob, checked. No torch, no numba."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core.errors import SerdeError
from lmcache_core.record import RecordHeader
from lmcache_core.serde.blob import Head, Mode, Reader
from lmcache_core.serde.cachegen import MAX_LAYERS
from lmcache_core.serde.plane_layout import MAX_CHANNELS, MAX_PLANES, MAX_TOKENS, PlaneLayout
from lmcache_core.serde.tables import (
    BFLOAT16,
    DELTA_FLAG,
    FLOAT16,
    FLOAT32,
    LANES,
    NUM_SHAPES,
    STATE_WORDS,
    max_words,
)

Array = npt.NDArray[Any]

KINDS = MappingProxyType({"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32})


def can_be_quantised(dtype: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is KV `[sides, layers, tokens, channels]` of a floating-point dtype
    wide enough to quantise.
    """
    if dtype not in KINDS or len(shape) != 4:
        return False
    sides, layers, tokens, channels = shape
    return (
        0 < sides * layers <= MAX_PLANES
        and layers <= MAX_LAYERS
        and 0 < tokens <= MAX_TOKENS
        and 0 < channels <= MAX_CHANNELS
        and math.prod(shape) < 1 << 31
    )


@dataclass(frozen=True)
class Quantiser:
    """How the planes of a tensor are quantised.

    Attributes:
        mode: By token or by plane.
        levels: Largest symbol of each plane.
        fineness: By plane: the step in 1/256 of the standard deviation.
    """

    mode: Mode
    levels: tuple[int, ...]
    fineness: int = 0


FOREIGN_STREAMS = "the streams of an encoded tensor are not those of an encoder"


class NotQuantisableError(Exception):
    """A value is not finite, or a scale is not a usable divisor: the tensor must be encoded without
    loss.
    """


def is_quantised(header: RecordHeader, payload: memoryview) -> bool:
    """Return whether every tensor of an encoded record is quantised, none stored without loss.

    Raises:
        SerdeError: The payload is not such a record.
    """
    return all(
        Reader(payload[spec.offset : spec.offset + spec.length]).head().mode
        in (Mode.BY_TOKEN, Mode.BY_PLANE)
        for spec in header.tensors
    )


@dataclass(frozen=True)
class QuantisedBlob:
    """The arrays of a blob, checked for everything that a decoder must not encounter, except its
    streams.

    Attributes:
        by_token: Whether there is a scale for each token, or else for each plane.
        levels: Largest symbol of each plane; a table for it exists.
        scales: uint32 `[planes, tokens or 1]`: float32 bits, finite, not negative.
        shifts: int16 `[planes, groups]`.
        shapes: uint8 `[planes, groups]`.
        lengths: int32 `[planes, sections]`: number of words of each stream.
        words: int16: all streams.
    """

    by_token: bool
    levels: list[int]
    scales: Array
    shifts: Array
    shapes: Array
    lengths: Array
    words: Array


def read_quantised(
    reader: Reader, head: Head, layout: PlaneLayout, known_levels: tuple[int, ...]
) -> QuantisedBlob:
    """Read a blob after its head.

    Args:
        reader: Positioned after the head.
        head: The head, of mode by token or by plane.
        layout: Layout of the tensor; the blob's must be the same.
        known_levels: The alphabets for which there are tables.

    Raises:
        SerdeError: The bytes are not such a blob.
    """
    if head.sizes != (layout.planes, layout.tokens, layout.channels, 0):
        raise SerdeError(f"an encoded tensor of sizes {head.sizes}, expected {layout}")
    if head.dtype not in KINDS.values() or head.itemsize != (4 if head.dtype == FLOAT32 else 2):
        raise SerdeError(
            f"an encoded tensor of dtype {head.dtype} in {head.itemsize} bytes an element"
        )
    by_token = head.mode is Mode.BY_TOKEN
    levels = reader.array("u1", layout.planes)
    scales = _unpacked_scales(reader, layout, head.dtype, by_token)
    shifts = reader.array("<i2", layout.planes * layout.groups)
    shapes: Array = reader.array("u1", layout.planes * layout.groups)
    lengths: Array = reader.array("<u4", layout.planes * layout.sections)
    unknown = set(levels.tolist()) - set(known_levels)
    if unknown:
        raise SerdeError(
            f"an encoded tensor with {min(unknown)} levels; there are tables for {known_levels}"
        )
    tables = shapes & (DELTA_FLAG - 1)
    if (tables >= NUM_SHAPES).any():
        raise SerdeError(f"an encoded tensor that names table {int(tables.max())} of {NUM_SHAPES}")
    longest = max_words(layout.tokens * layout.section)
    if (lengths < LANES * STATE_WORDS).any() or (lengths > longest).any():
        raise SerdeError("an encoded tensor with a stream of impossible length")
    words = reader.array("<i2", int(lengths.sum(dtype=np.int64)))
    reader.finish()
    groups = layout.planes, layout.groups
    return QuantisedBlob(
        by_token,
        levels.tolist(),
        scales,
        shifts.reshape(groups),
        shapes.reshape(groups),
        lengths.astype(np.int32).reshape(layout.planes, layout.sections),
        words,
    )


def _unpacked_scales(reader: Reader, layout: PlaneLayout, kind: int, by_token: bool) -> Array:
    """Return the scales in the form that `restore` expects: float32 bits, finite, not negative.

    Raises:
        SerdeError: They are invalid.
    """
    count = layout.planes * (layout.tokens if by_token else 1)
    if not by_token or kind == FLOAT32:
        scales: Array = np.array(reader.array("<u4", count), np.uint32)
    elif kind == KINDS["bfloat16"]:
        scales = reader.array("<u2", count).astype(np.uint32) << np.uint32(16)
    else:
        scales = reader.array("<f2", count).astype(np.float32).view(np.uint32)
    if (scales >= np.uint32(0x7F800000)).any():
        raise SerdeError("an encoded tensor with a scale that is negative or not finite")
    return scales.reshape(layout.planes, -1)
