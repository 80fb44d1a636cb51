"""Losslessly encoded tensors: runs, frequencies, and blobs that no encoder writes; and the tables
of the other codecs. Any tensor and any damage: `tests/property/test_codec_round_trip.py` and
`test_codec_fuzz.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde.blob import HEAD, Reader
from lmcache_core.serde.lossless import (
    MAX_BLOCK_ELEMENTS,
    MIN_BLOCK_ELEMENTS,
    RUN_ELEMENTS,
    LosslessCoder,
    normalised,
)
from lmcache_core.serde.machine_code import load_loops
from lmcache_core.serde.tables import LEVELS, TOTAL, TableSet, bell_curves, flattened, reciprocals


@pytest.fixture
def coder() -> Iterator[LosslessCoder]:
    with ThreadPoolExecutor(2) as pool:
        yield LosslessCoder(load_loops(), pool)


def encoded(coder: LosslessCoder, raw: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    return b"".join(
        bytes(memoryview(piece).cast("B")) for piece in coder.encode(memoryview(raw), dtype, shape)
    )


def decoded(coder: LosslessCoder, blob: bytes, size: int) -> bytes:
    reader = Reader(memoryview(blob))
    head = reader.head()
    out = bytearray(b"\xa5" * size)
    coder.decode(reader, head, memoryview(out))
    return bytes(out)


def words(count: int, itemsize: int, seed: int = 0) -> bytes:
    """Elements whose upper byte is one of few."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, itemsize), np.uint8)
    data[:, -1] = 0x3C + rng.integers(0, 4, count)
    return data.tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float64"])
@pytest.mark.parametrize("count", [31, 33, RUN_ELEMENTS - 1, RUN_ELEMENTS, RUN_ELEMENTS + 1])
def test_runs_of_any_length_come_back(coder: LosslessCoder, dtype: str, count: int) -> None:
    raw = words(count, DTYPE_ITEMSIZE[dtype])
    assert decoded(coder, encoded(coder, raw, dtype, (count,)), len(raw)) == raw


def altered(blob: bytes, at: int, layout: str, *numbers: int) -> bytes:
    return blob[:at] + struct.pack(layout, *numbers) + blob[at + struct.calcsize(layout) :]


@pytest.mark.parametrize("block", [0, 1, MIN_BLOCK_ELEMENTS - 1, MAX_BLOCK_ELEMENTS + 1])
def test_a_block_that_no_encoder_makes_is_refused_before_anything_is_held_for_it(
    coder: LosslessCoder, block: int
) -> None:
    """One element a block would be a table of 2 KB for each of them."""
    raw = words(1000, 2)
    blob = encoded(coder, raw, "bfloat16", (1000,))
    with pytest.raises(SerdeError, match=f"blocks of {block} elements"):
        decoded(coder, altered(blob, 16, "<I", block), len(raw))


def test_tables_that_no_encoder_writes_are_refused(coder: LosslessCoder) -> None:
    raw = words(1000, 2)
    blob = encoded(coder, raw, "bfloat16", (1000,))
    num_symbols = blob[HEAD.size] + 1
    assert num_symbols > 2
    symbols_at, counts_at = HEAD.size + 1, HEAD.size + 1 + num_symbols
    first, second = struct.unpack_from("<HH", blob, counts_at)
    for damaged in (
        altered(blob, symbols_at, "BB", blob[symbols_at + 1], blob[symbols_at]),
        altered(blob, symbols_at, "BB", blob[symbols_at], blob[symbols_at]),
        altered(blob, counts_at, "<HH", first + 1, second),
        altered(blob, counts_at, "<HH", 0, first + second),
        altered(blob, counts_at, "<HH", 65535, second),
    ):
        with pytest.raises(SerdeError, match="frequencies"):
            decoded(coder, damaged, len(raw))


def test_rare_symbols_have_room_in_the_frequencies() -> None:
    """Of one symbol almost always and 255 others once, rounded up, there is more than the sum."""
    for counts in (np.ones(256, np.int64), np.eye(256, dtype=np.int64)[7] * 10**9 + 1):
        frequencies = normalised(counts)
        assert frequencies.sum() == TOTAL
        assert (frequencies > 0).all()


def test_other_tables_have_another_id() -> None:
    other = {levels: bell_curves().of(levels).frequencies.copy() for levels in LEVELS}
    other[7][3, 7] -= 1
    other[7][3, 8] += 1
    assert TableSet(other).id != bell_curves().id
    assert TableSet(dict(reversed(other.items()))).id == TableSet(other).id


def test_reciprocals_divide_every_state() -> None:
    """Quotients change at multiples of the frequency: there, next to them, at both ends and
    anywhere.
    """
    rng = np.random.default_rng(0)
    frequencies = np.arange(TOTAL + 1)
    multipliers, shifts = reciprocals(frequencies)
    assert (multipliers[0], shifts[0]) == (0, 0)
    for frequency in range(1, TOTAL + 1):
        quotients = rng.integers(0, ((1 << 31) - 1) // frequency + 1, 200, np.uint64)
        last = (1 << 31) - 1
        before = max(last // frequency * frequency - 1, 0)
        ends = np.array([0, 1, last - 1, last, before], np.uint64)
        multiples = quotients * np.uint64(frequency)
        states = np.concatenate([multiples, multiples + np.uint64(frequency - 1), ends])
        states = states[states < 1 << 31]
        divided = (states * np.uint64(multipliers[frequency])) >> np.uint64(shifts[frequency])
        np.testing.assert_array_equal(divided, states // np.uint64(frequency))


def test_tables_that_cannot_code_are_refused() -> None:
    rows = bell_curves().of(3).frequencies
    for shape, at, change in ((0, 3, 1), (1, 0, -int(rows[1, 0])), (2, 0, -1)):
        damaged = rows.copy()
        damaged[shape, at] += change
        with pytest.raises(SerdeError, match="tables for 3 levels"):
            flattened(3, damaged)
    shifted = rows.copy()
    shifted[1, 3] += shifted[1, 0]
    shifted[1, 0] = 0
    with pytest.raises(SerdeError, match="every symbol some room"):
        flattened(3, shifted)
    with pytest.raises(SerdeError, match="tables for 3 levels"):
        flattened(3, rows[:-1])
    with pytest.raises(SerdeError, match="no tables for 5 levels"):
        bell_curves().of(5)
