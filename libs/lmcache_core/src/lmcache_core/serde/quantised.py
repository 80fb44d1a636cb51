"""Encodes a quantised tensor as a blob, and decodes it: one plane at a time, each on any thread.

The split of a tensor into planes, groups of channels and sections follows from its shape
(docs/codec.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core.errors import SerdeError
from lmcache_core.record import RecordHeader
from lmcache_core.serde.blob import Head, Mode, Reader, next_power_of_two
from lmcache_core.serde.cachegen import MAX_LAYERS
from lmcache_core.serde.machine_code import Loops, side_by_side
from lmcache_core.serde.rans import LANES, STATE_WORDS, max_words
from lmcache_core.serde.symbols import DELTA_FLAG, NUM_SUMS
from lmcache_core.serde.tables import NUM_SHAPES, TableSet
from lmcache_core.serde.values import BFLOAT16, FLOAT16, FLOAT32, UNIT

Array = npt.NDArray[Any]

KINDS = MappingProxyType({"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32})
MAX_TOKENS = 1 << 15
MAX_CHANNELS = 1 << 20
MAX_PLANES = 1 << 16
SECTION_CHANNELS = 128
SECTION_TOKENS = 128
"""A section has `SECTION_CHANNELS` channels, or more if there are fewer than `SECTION_TOKENS`
tokens.
"""
GROUP_SYMBOLS = 64
"""Channels with fewer symbols than this share a table."""


@dataclass(frozen=True)
class PlaneLayout:
    """The shape of a quantised tensor `[sides, layers, tokens, channels]`; a plane is one layer of
    one side.

    Attributes:
        planes: Number of planes.
        tokens: Rows of a plane.
        channels: Values of a row.
    """

    planes: int
    tokens: int
    channels: int

    def __post_init__(self) -> None:
        if not (
            0 < self.planes <= MAX_PLANES
            and 0 < self.tokens <= MAX_TOKENS
            and 0 < self.channels <= MAX_CHANNELS
        ):
            raise SerdeError(
                f"{self.planes} planes of {self.tokens} tokens of {self.channels} channels cannot"
                " be quantised"
            )

    @property
    def group(self) -> int:
        """Channels that share shift and table."""
        return next_power_of_two(-(-GROUP_SYMBOLS // self.tokens))

    @property
    def groups(self) -> int:
        """Groups of a plane."""
        return -(-self.channels // self.group)

    @property
    def section(self) -> int:
        """Channels of a section; the last section of a plane may have fewer."""
        return min(
            self.channels, SECTION_CHANNELS * next_power_of_two(-(-SECTION_TOKENS // self.tokens))
        )

    @property
    def sections(self) -> int:
        """Sections of a plane."""
        return -(-self.channels // self.section)

    @property
    def widths(self) -> list[int]:
        """Channels of each section of a plane."""
        return [
            min(self.section, self.channels - first)
            for first in range(0, self.channels, self.section)
        ]


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


class _Scratch(threading.local):
    """A thread's arrays, kept from plane to plane: new memory would cost as much as the work."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def get(self, name: str, dtype: str, count: int) -> Array:
        array = self._arrays.get(name)
        if array is None or array.size < count:
            array = self._arrays[name] = np.empty(count, dtype)
        return array[:count]


class QuantisedCoder:
    """Encodes and decodes tensors `[sides, layers, tokens, channels]`. Thread-safe.

    Args:
        loops: Machine code.
        tables: Probability tables.
        pool: Threads that work on planes.
    """

    def __init__(self, loops: Loops, tables: TableSet, pool: Executor) -> None:
        self._loops = loops
        self._tables = tables
        self._pool = pool
        self._scratch = _Scratch()

    def encode(
        self, raw: memoryview, dtype: str, layout: PlaneLayout, quantiser: Quantiser
    ) -> tuple[list[Any], Array]:
        """Encode a tensor.

        Args:
            raw: Its bytes.
            dtype: One of `layout.KINDS`.
            layout: Its shape.
            quantiser: How to quantise it.

        Returns:
            The pieces of the blob, in order, and int64 `[planes, 3]`: for each plane the largest
                error, the sum of squared errors (in 1/UNIT of their scale, squared) and the sum of
                squared values.

        Raises:
            NotQuantisableError: See there.
        """
        kind = KINDS[dtype]
        values = np.frombuffer(raw, "<u4" if kind == FLOAT32 else "<u2").reshape(
            layout.planes, layout.tokens * layout.channels
        )
        by_token = quantiser.mode is Mode.BY_TOKEN
        scales = np.zeros((layout.planes, layout.tokens if by_token else 1), np.uint32)
        shifts = np.zeros((layout.planes, layout.groups), np.int16)
        shapes = np.zeros((layout.planes, layout.groups), np.uint8)
        errors = np.zeros((layout.planes, 3), np.int64)

        lengths = np.zeros((layout.planes, layout.sections), np.int64)

        def encode_plane(plane: int) -> Array:
            outputs = scales[plane], shifts[plane], shapes[plane], errors[plane], lengths[plane]
            return self._encode_plane(
                values[plane], (kind, quantiser.levels[plane], quantiser.fineness), layout, outputs
            )

        streams = side_by_side(self._pool, encode_plane, range(layout.planes))
        head = Head(
            quantiser.mode,
            kind,
            values.itemsize,
            (layout.planes, layout.tokens, layout.channels, 0),
        )
        levels = np.array(quantiser.levels, np.uint8)
        return [
            head.pack(),
            levels,
            _packed_scales(scales, kind, by_token),
            shifts,
            shapes,
            lengths.astype("<u4"),
            *streams,
        ], errors

    def decode(self, reader: Reader, head: Head, layout: PlaneLayout, out: memoryview) -> None:
        """Decode a blob after its head.

        Args:
            reader: Positioned after the head.
            head: The head, of mode by token or by plane.
            layout: The tensor's shape; the blob's must be the same.
            out: The tensor's bytes, written.

        Raises:
            SerdeError: The bytes are not such a blob.
        """
        blob = read_quantised(reader, head, layout, self._tables.levels)
        size = head.itemsize * layout.planes * layout.tokens * layout.channels
        if len(out) != size:
            raise SerdeError(f"an encoded tensor of {size} bytes for {len(out)} bytes")
        lengths = blob.lengths.astype(np.int64)
        starts = np.cumsum(lengths.sum(1)) - lengths.sum(1)
        words = blob.words.view(np.uint16)
        values = np.frombuffer(out, "<u4" if head.dtype == FLOAT32 else "<u2").reshape(
            layout.planes, layout.tokens * layout.channels
        )

        def decode_plane(plane: int) -> bool:
            inputs = lengths[plane], blob.scales[plane], blob.shifts[plane], blob.shapes[plane]
            place = int(starts[plane]), head.dtype, blob.levels[plane], int(blob.by_token)
            return self._decode_plane(words, place, inputs, layout, values[plane])

        if not all(side_by_side(self._pool, decode_plane, range(layout.planes))):
            raise SerdeError(FOREIGN_STREAMS)

    def _encode_plane(
        self,
        raw: Array,
        how: tuple[int, int, int],
        layout: PlaneLayout,
        outputs: tuple[Array, Array, Array, Array, Array],
    ) -> Array:
        kind, levels, fineness = how
        scales, shifts, shapes, errors, lengths = outputs
        tokens, channels = layout.tokens, layout.channels
        quantised = self._scratch.get("quantised", "i2", tokens * channels)
        symbols = self._scratch.get("symbols", "u1", tokens * channels)
        rows = self._scratch.get("rows", "u4", 2 * channels)
        if fineness:
            is_bad = self._loops.quantise_by_plane(
                raw, (tokens, channels, kind, fineness), quantised, scales, errors, rows
            )
        else:
            is_bad = self._loops.quantise_by_token(
                raw, (tokens, channels, kind, levels), quantised, scales, errors, rows
            )
        if is_bad:
            raise NotQuantisableError
        tables = self._tables.of(levels)
        sums = self._scratch.get("sums", "i4", NUM_SUMS * channels).reshape(NUM_SUMS, channels)
        how_chosen = tokens, channels, layout.group, levels, int(not fineness)
        self._loops.choose(quantised, how_chosen, tables.choice, shifts, shapes, sums, symbols)
        columns = _by_channel(shapes & (DELTA_FLAG - 1), layout)
        words = self._scratch.get(
            "words", "u2", sum(max_words(tokens * width) for width in layout.widths)
        )
        sections = tokens, channels, layout.section, tables.stride
        start = self._loops.encode_sections(
            symbols, sections, columns, tables.coder, words, lengths
        )
        return words[start:].copy()

    def _decode_plane(
        self,
        words: Array,
        place: tuple[int, int, int, int],
        inputs: tuple[Array, Array, Array, Array],
        layout: PlaneLayout,
        raw: Array,
    ) -> bool:
        start, kind, levels, by_token = place
        lengths, scales, shifts, shapes = inputs
        tokens, channels = layout.tokens, layout.channels
        tables = self._tables.of(levels)
        symbols = self._scratch.get("symbols", "u1", tokens * channels)
        columns = _by_channel(shapes & (DELTA_FLAG - 1), layout)
        sections = start, tokens, channels, layout.section, tables.stride.bit_length() - 1
        if self._loops.decode_sections(
            words,
            sections,
            lengths,
            columns,
            tables.slot_symbol,
            tables.start_and_frequency,
            symbols,
        ):
            return False
        about = self._scratch.get("columns", "i4", 3 * channels).reshape(3, channels)
        about[0] = _by_channel(shifts, layout)
        about[1] = -(_by_channel(shapes, layout) >> 7).astype(np.int32)
        rows = self._scratch.get("rows", "u4", channels)
        self._loops.restore(
            symbols, raw, (tokens, channels, kind, levels, by_token), scales, about, rows
        )
        return True


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


def group_errors(
    errors: Array, groups: Sequence[tuple[str, slice]]
) -> list[tuple[str, float, float]]:
    """Return the largest and root mean square error of groups of planes.

    Args:
        errors: int64 `[planes, 3]`, from `QuantisedCoder.encode`.
        groups: Name and planes of each group.

    Returns:
        For each group its name, the largest error relative to its scale, and the root of the
            squared errors relative to that of the squared values.
    """
    figures = []
    for name, planes in groups:
        of_group = errors[planes]
        power = int(of_group[:, 2].sum())
        rms = (int(of_group[:, 1].sum()) / power) ** 0.5 if power else 0.0
        figures.append((name, int(of_group[:, 0].max(initial=0)) / UNIT, rms))
    return figures


def _by_channel(of_group: Array, layout: PlaneLayout) -> Array:
    """Return values of groups, expanded to channels."""
    return of_group if layout.group == 1 else np.repeat(of_group, layout.group)[: layout.channels]


def _packed_scales(scales: Array, kind: int, by_token: bool) -> Array:
    """Return the scales as stored: by token as values of the dtype, by plane as float32."""
    if not by_token or kind == FLOAT32:
        return scales
    return (
        (scales >> 16).astype("<u2")
        if kind == KINDS["bfloat16"]
        else scales.view(np.float32).astype("<f2")
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
