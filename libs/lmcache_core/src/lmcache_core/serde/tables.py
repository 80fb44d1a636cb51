"""Numbers of the format, and its probability tables: discrete bell curves of growing width, the
same on every machine, named by what they hold.

A channel's symbols are centred on its mean, so that a curve's width is all that is left to say: one
byte a channel, instead of a distribution for each. Curves come twice: `tight`, which gives symbols
far from the centre no room, and `wide`, which gives each some.

Source: sampled normal density, computed in decimal arithmetic and rounded to integers, so that the
    bits do not depend on a machine's floating point. On KV of a trained model, curves chosen by
    variance come within 1 % of the best of 128 tables fitted to that model (docs/codec.md).
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lmcache_core.errors import SerdeError

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
"""Element types, as a blob's head names them."""
LANES = 32
"""Coders interleaved in a stream."""
STATE_WORDS = 2
DELTA_FLAG = 128
"""In a channel's byte, along with its table."""
PRECISION_BITS = 12
TOTAL = 1 << PRECISION_BITS
NUM_WIDTHS = 24
NUM_SHAPES = 2 * NUM_WIDTHS
VARIANCE_UNIT = 256
"""Variances are compared in whole parts of this."""
LEVELS = (1, 3, 7, 15, 31, 63, 127)
"""Largest symbols, either side of zero, that there are tables for."""
MAX_LEVELS = 127
ID_CHARS = 16
_NARROWEST = Decimal("0.2")
_WIDEST_SHARE = Decimal("0.75")
_WIDEST = Decimal(48)
_TIGHT_WIDTHS = 4
_CONTEXT = Context(prec=28)

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


def max_words(num_symbols: int) -> int:
    """Return the largest number of words for `num_symbols` symbols: no symbol takes more than
    one.
    """
    return num_symbols + LANES * STATE_WORDS


@dataclass(frozen=True)
class ShapeTables:
    """The tables for symbols in `-levels … levels`, in the form that the coding loops use.

    Attributes:
        levels: Largest symbol.
        frequencies: `[NUM_SHAPES, 2 * levels + 1]`, each row sums to `TOTAL`; 0 for symbols that a
            tight shape cannot code.
        stride: Entries of one shape in the flat arrays below: the next power of two.
        coder: uint32 `[NUM_SHAPES * stride, 4]`: frequency, where a symbol's slots start, and the
            two of `reciprocals`.
        slot_symbol: uint8 `[NUM_SHAPES * TOTAL]`, the symbol (plus `levels`) of each slot.
        start_and_frequency: uint32, start in the upper half and frequency in the lower.
        choice: int64 `[2, NUM_WIDTHS]`. First row, in `1 / VARIANCE_UNIT`: the width chosen is the
            number of bounds below the variance (the last one is beyond any). Second row: the
            largest symbol that the tight shape of each width can code.
    """

    levels: int
    frequencies: I64
    stride: int
    coder: U32
    slot_symbol: U8
    start_and_frequency: U32
    choice: I64


class TableSet:
    """The tables of every alphabet, under one name.

    Args:
        frequencies: By `levels`: `[NUM_SHAPES, 2 * levels + 1]`, wide and tight shapes in turn,
            narrow to broad.

    Attributes:
        id: First `ID_CHARS` characters of the SHA-256 of their canonical bytes.

    Raises:
        SerdeError: A row does not sum to `TOTAL`, or a wide shape has a symbol without room.
    """

    def __init__(self, frequencies: Mapping[int, I64]) -> None:
        self._tables = MappingProxyType(
            {levels: flattened(levels, rows) for levels, rows in sorted(frequencies.items())}
        )
        digest = hashlib.sha256(b"lmcache codec tables 1")
        for levels, tables in self._tables.items():
            digest.update(struct.pack("<HHH", levels, *tables.frequencies.shape))
            digest.update(tables.frequencies.astype("<u2").tobytes())
        self.id = digest.hexdigest()[:ID_CHARS]

    @property
    def levels(self) -> tuple[int, ...]:
        """The alphabets there are tables for."""
        return tuple(self._tables)

    def of(self, levels: int) -> ShapeTables:
        """Return the tables for symbols in `-levels … levels`.

        Raises:
            SerdeError: There are none.
        """
        if levels not in self._tables:
            raise SerdeError(
                f"no tables for {levels} levels; there are tables for"
                f" {', '.join(map(str, self._tables))}"
            )
        return self._tables[levels]


@functools.cache
def bell_curves() -> TableSet:
    """Return the tables that every process has."""
    return TableSet({levels: _bell_rows(levels) for levels in LEVELS})


def flattened(levels: int, frequencies: I64) -> ShapeTables:
    """Return the tables in the form that the loops use.

    Raises:
        SerdeError: See `TableSet`.
    """
    size = 2 * levels + 1
    if (
        frequencies.shape != (NUM_SHAPES, size)
        or (frequencies < 0).any()
        or (frequencies.sum(1) != TOTAL).any()
    ):
        raise SerdeError(
            f"tables for {levels} levels: each of {NUM_SHAPES} shapes must be {size} frequencies"
            f" that sum to {TOTAL}"
        )
    if (frequencies[1::2] == 0).any():
        raise SerdeError(
            f"tables for {levels} levels: a wide shape must give every symbol some room"
        )
    stride = 1 << (size - 1).bit_length()
    rows = np.zeros((NUM_SHAPES, stride), np.int64)
    rows[:, :size] = frequencies
    starts = np.cumsum(rows, 1) - rows
    slots = np.zeros((NUM_SHAPES, TOTAL), np.uint8)
    for shape in range(NUM_SHAPES):
        slots[shape] = np.repeat(np.arange(stride), rows[shape])
    squares = np.arange(-levels, levels + 1, dtype=np.int64) ** 2
    variances = [int(row @ squares) * VARIANCE_UNIT // TOTAL for row in frequencies[0::2]]
    bounds = [(low + high) // 2 for low, high in pairwise(variances)]
    support = [int(np.flatnonzero(row)[-1]) - levels for row in frequencies[0::2]]
    return ShapeTables(
        levels,
        frequencies,
        stride,
        np.stack(
            [
                rows.ravel().astype(np.uint32),
                starts.ravel().astype(np.uint32),
                *reciprocals(rows.ravel()),
            ],
            axis=1,
        ),
        slots.ravel(),
        (starts << 16 | rows).ravel().astype(np.uint32),
        np.array([[*bounds, np.iinfo(np.int64).max], support]),
    )


def reciprocals(frequencies: I64) -> tuple[U32, U32]:
    """Multiplier and shift that divide any number below 2^31 by each frequency (up to `TOTAL`); 0
    for 0.

    Source: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994,
        theorem 4.2, with N = 31.
    """
    divisors = np.maximum(frequencies, 1)
    shifts = 31 + np.frexp(divisors - 1)[1].astype(np.int64)  # 31 and the bits of what is below it
    multipliers = -(-(1 << shifts) // divisors)
    is_used = frequencies > 0
    return (multipliers * is_used).astype(np.uint32), (shifts * is_used).astype(np.uint32)


def _bell_rows(levels: int) -> I64:
    widest = min(_WIDEST, _WIDEST_SHARE * levels)
    rows = np.zeros((NUM_SHAPES, 2 * levels + 1), np.int64)
    for i in range(NUM_WIDTHS):
        step = _CONTEXT.divide(Decimal(i), Decimal(NUM_WIDTHS - 1))
        width = _CONTEXT.multiply(
            _NARROWEST, _CONTEXT.power(_CONTEXT.divide(widest, _NARROWEST), step)
        )
        tight = min(levels, int(_CONTEXT.multiply(width, Decimal(_TIGHT_WIDTHS))) + 1)
        rows[2 * i] = _bell_row(levels, width, tight)
        rows[2 * i + 1] = _bell_row(levels, width, levels)
    return rows


def _bell_row(levels: int, width: Decimal, support: int) -> I64:
    """Return the frequencies of a normal density with that standard deviation, at least 1 within
    the support, 0 outside; they sum to `TOTAL`.
    """
    doubled_variance = _CONTEXT.multiply(Decimal(2), _CONTEXT.multiply(width, width))
    density = [
        _CONTEXT.exp(_CONTEXT.divide(Decimal(-(symbol * symbol)), doubled_variance))
        for symbol in range(support + 1)
    ]
    mass = _CONTEXT.subtract(_CONTEXT.multiply(Decimal(2), sum(density, Decimal(0))), density[0])
    spare = TOTAL - (2 * support + 1)
    side = [
        1 + int(_CONTEXT.divide(_CONTEXT.multiply(Decimal(spare), share), mass))
        for share in density
    ]
    row = np.zeros(2 * levels + 1, np.int64)
    row[levels - support : levels + support + 1] = side[:0:-1] + side
    row[levels] += TOTAL - int(row.sum())
    return row
