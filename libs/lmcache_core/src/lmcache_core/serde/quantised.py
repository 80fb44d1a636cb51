"""Encodes a quantised tensor as a blob, and decodes it: one plane at a time, each on any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lmcache_core.errors import SerdeError
from lmcache_core.serde.blob import Head, Mode, Reader
from lmcache_core.serde.machine_code import Loops, side_by_side
from lmcache_core.serde.plane_layout import PlaneLayout
from lmcache_core.serde.quantised_blob import (
    FOREIGN_STREAMS,
    KINDS,
    NotQuantisableError,
    Quantiser,
    read_quantised,
)
from lmcache_core.serde.symbols import NUM_SUMS
from lmcache_core.serde.tables import (
    DELTA_FLAG,
    FLOAT32,
    TableSet,
    max_words,
)
from lmcache_core.serde.values import UNIT

Array = npt.NDArray[Any]
T = TypeVar("T")

VALUES_AT_ONCE = 1 << 16


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
    """Encodes and decodes tensors `[sides, layers, tokens, channels]`. Thread-safe."""

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
            dtype: One of `layout.KINDS`.

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

        streams = self._each_plane(layout, encode_plane)
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

        if not all(self._each_plane(layout, decode_plane)):
            raise SerdeError(FOREIGN_STREAMS)

    def _each_plane(self, layout: PlaneLayout, work: Callable[[int], T]) -> list[T]:
        """Return the results for each plane, from threads that take several small planes at once:
        handing one over costs a tenth of encoding 2^14 values.
        """
        at_once = max(1, VALUES_AT_ONCE // (layout.tokens * layout.channels))

        def work_on(first: int) -> list[T]:
            return [work(plane) for plane in range(first, min(first + at_once, layout.planes))]

        runs = side_by_side(self._pool, work_on, range(0, layout.planes, at_once))
        return [result for run in runs for result in run]

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
