"""Encodes any tensor as a blob without loss, and decodes it: one block of elements at a time, each
on any thread.

The part of the elements that varies little (the exponent) is entropy-coded, the rest is stored as
is (docs/codec.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde.blob import Head, Mode, Reader
from lmcache_core.serde.machine_code import Loops, side_by_side
from lmcache_core.serde.tables import (
    LANES,
    PRECISION_BITS,
    STATE_WORDS,
    TOTAL,
    max_words,
    reciprocals,
)

Array = npt.NDArray[Any]

ROTATED = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes whose sign moves to the low end; the exponent of the 8-bit ones shares its byte with the
rest anyway.
"""
RUN_ELEMENTS = 1 << 15
MIN_BLOCK_ELEMENTS = 1 << 14
MAX_BLOCK_ELEMENTS = 1 << 18
ALPHABET = 256
_ALPHABET_BITS = 8


class LosslessCoder:
    """Encodes and decodes tensors of any dtype and shape. Thread-safe."""

    def __init__(self, loops: Loops, pool: Executor) -> None:
        self._loops = loops
        self._pool = pool
        self._reciprocals = np.stack(reciprocals(np.arange(TOTAL + 1)))
        self._first_table = np.zeros(MAX_BLOCK_ELEMENTS, np.uint8)

    def encode(self, raw: memoryview, dtype: str, shape: Sequence[int]) -> list[Any]:
        """Encode a tensor.

        Args:
            shape: Its shape; of `[sides, layers, tokens, channels]` each block holds whole layers,
                as far as that suits.

        Returns:
            The pieces of the blob, in order.
        """
        itemsize = DTYPE_ITEMSIZE[dtype]
        elements = len(raw) // itemsize
        block = block_elements(shape)
        rotated = int(dtype in ROTATED)
        values = np.frombuffer(raw, np.uint8)

        def encode_block(start: int) -> tuple[bytes, Array, Array, Array]:
            return self._encode_block(
                values[start * itemsize : (start + block) * itemsize], itemsize, rotated
            )

        blocks = side_by_side(self._pool, encode_block, range(0, elements, block))
        head = Head(
            Mode.LOSSLESS, rotated, itemsize, (elements & 0xFFFFFFFF, elements >> 32, block, 0)
        )
        tables, lengths, words, rest = zip(*blocks, strict=True) if blocks else ((), (), (), ())
        return [head.pack(), *tables, *lengths, *words, *rest]

    def decode(self, reader: Reader, head: Head, out: memoryview) -> None:
        """Decode a blob after its head.

        Args:
            reader: After the head.
            head: The head, of mode lossless.
            out: The tensor's bytes, written.

        Raises:
            SerdeError: The bytes are not such a blob.
        """
        itemsize, block = head.itemsize, head.sizes[2]
        elements = head.sizes[0] | head.sizes[1] << 32
        if (
            itemsize not in (1, 2, 4, 8)
            or head.dtype > 1
            or elements * itemsize != len(out)
            or head.sizes[3]
        ):
            raise SerdeError(
                f"an encoded tensor of {elements} elements of {itemsize} bytes for {len(out)} bytes"
            )
        if not MIN_BLOCK_ELEMENTS <= block <= MAX_BLOCK_ELEMENTS:
            raise SerdeError(
                f"an encoded tensor in blocks of {block} elements; {MIN_BLOCK_ELEMENTS} to"
                f" {MAX_BLOCK_ELEMENTS} share a table"
            )
        sizes = [min(block, elements - start) for start in range(0, elements, block)]
        tables = [_read_table(reader) for _ in sizes]
        runs_of = [-(-size // RUN_ELEMENTS) for size in sizes]
        lengths = reader.array("<u4", sum(runs_of)).astype(np.int64)
        if (lengths < LANES * STATE_WORDS).any() or (lengths > max_words(RUN_ELEMENTS)).any():
            raise SerdeError("an encoded tensor with a stream of impossible length")
        words = reader.array("<u2", int(lengths.sum()))
        rest = np.frombuffer(reader.take((itemsize - 1) * elements), np.uint8)
        reader.finish()
        lengths_of = np.split(lengths, np.cumsum(runs_of)[:-1]) if sizes else []
        starts = np.cumsum([0, *(int(of_block.sum()) for of_block in lengths_of)])
        values = np.frombuffer(out, np.uint8)

        def decode_block(index: int) -> bool:
            start, size = index * block, sizes[index]
            low = rest[start * (itemsize - 1) : (start + size) * (itemsize - 1)]
            raw = values[start * itemsize : (start + size) * itemsize]
            return self._decode_block(
                words[int(starts[index]) :], lengths_of[index], tables[index], low, raw, head
            )

        if not all(side_by_side(self._pool, decode_block, range(len(sizes)))):
            raise SerdeError("the streams of an encoded tensor are not those of an encoder")

    def _encode_block(
        self, raw: Array, itemsize: int, rotated: int
    ) -> tuple[bytes, Array, Array, Array]:
        elements = raw.size // itemsize
        first, rest = np.empty(elements, np.uint8), np.empty(elements * (itemsize - 1), np.uint8)
        self._loops.split(raw, (itemsize, rotated), first, rest)
        counts = np.zeros((4, ALPHABET), np.int64)
        self._loops.count(first, counts)
        frequencies = normalised(counts.sum(0))
        coder = np.stack(
            [frequencies, np.cumsum(frequencies) - frequencies, *self._reciprocals[:, frequencies]],
            axis=1,
        ).astype(np.uint32)
        lengths = np.zeros(-(-elements // RUN_ELEMENTS), np.int64)
        words = np.empty(lengths.size * max_words(RUN_ELEMENTS), np.uint16)
        runs = 1, elements, RUN_ELEMENTS, ALPHABET
        start = self._loops.encode_sections(
            first, runs, self._first_table[:elements], coder, words, lengths
        )
        present = np.flatnonzero(frequencies)
        table = (
            bytes([present.size - 1])
            + present.astype(np.uint8).tobytes()
            + frequencies[present].astype("<u2").tobytes()
        )
        return table, lengths.astype("<u4"), words[start:].copy(), rest

    def _decode_block(
        self, words: Array, lengths: Array, frequencies: Array, rest: Array, raw: Array, head: Head
    ) -> bool:
        first = np.empty(raw.size // head.itemsize, np.uint8)
        slots = np.repeat(np.arange(ALPHABET, dtype=np.uint8), frequencies)
        starts = ((np.cumsum(frequencies) - frequencies) << 16 | frequencies).astype(np.uint32)
        runs = 0, 1, first.size, RUN_ELEMENTS, _ALPHABET_BITS
        if self._loops.decode_sections(
            words, runs, lengths, self._first_table[: first.size], slots, starts, first
        ):
            return False
        self._loops.join(first, rest, (head.itemsize, head.dtype), raw)
        return True


def block_elements(shape: Sequence[int]) -> int:
    """Return the number of elements that share a table: whole layers of KV if that is a suitable
    size.
    """
    if len(shape) != 4:
        return MAX_BLOCK_ELEMENTS
    layer = shape[2] * shape[3]
    if not 0 < layer <= MAX_BLOCK_ELEMENTS:
        return MAX_BLOCK_ELEMENTS
    return layer * -(-MIN_BLOCK_ELEMENTS // layer) if layer < MIN_BLOCK_ELEMENTS else layer


def normalised(counts: Array) -> Array:
    """Return frequencies that sum to `TOTAL`, at least 1 for each symbol that occurs (one does), 0
    for the others.
    """
    frequencies = np.where(
        counts > 0, np.maximum(1, counts * TOTAL // int(counts.sum())), 0
    ).astype(np.int64)
    missing = TOTAL - int(frequencies.sum())
    while missing < 0:
        largest = int(frequencies.argmax())
        taken = min(-missing, int(frequencies[largest]) // 2)
        frequencies[largest] -= taken
        missing += taken
    frequencies[int(frequencies.argmax())] += missing
    return frequencies


def _read_table(reader: Reader) -> Array:
    present = int(reader.array("u1", 1)[0]) + 1
    symbols, counts = reader.array("u1", present), reader.array("<u2", present).astype(np.int64)
    is_ordered = bool((np.diff(symbols.astype(np.int64)) > 0).all())
    if not is_ordered or (counts == 0).any() or int(counts.sum()) != 1 << PRECISION_BITS:
        raise SerdeError("an encoded tensor whose frequencies are not those of an encoder")
    frequencies = np.zeros(ALPHABET, np.int64)
    frequencies[symbols] = counts
    return frequencies
