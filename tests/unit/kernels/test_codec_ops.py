"""What the codec ops refuse, and their tables; no kernel runs here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmcache_kernels import KernelInputError
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.cachegen_encode import cachegen_encode
from lmcache_kernels.cachegen_quantize import cachegen_quantize_by_plane, cachegen_quantize_by_token
from lmcache_kernels.codec_shape import (
    MAX_CHANNELS,
    MAX_TOKENS,
    PRECISION_BITS,
    CodecShape,
    EncodedPlanes,
)
from lmcache_kernels.codec_tables import CodecTables

CPU = torch.device("cpu")
TOTAL = 1 << PRECISION_BITS


def alphabet(levels, num_tables=4, seed=0):
    random = np.random.default_rng(seed)
    rows = random.integers(1, 9, (num_tables, 2 * levels + 1))
    rows[0, 0] = 0
    rows[:, levels] += TOTAL - rows.sum(1)
    choice = np.array([[10, np.iinfo(np.int64).max], [1, levels]])
    return SimpleNamespace(levels=levels, frequencies=rows, choice=choice)


@pytest.fixture
def tables():
    return CodecTables.of([alphabet(1), alphabet(7), alphabet(127)], CPU)


@pytest.mark.parametrize("levels", [1, 2, 7, 64, 127])
def test_entries_say_what_the_frequencies_say(levels):
    given = alphabet(levels, seed=levels)
    tables = CodecTables.of([alphabet(3), given], CPU)
    stride, first = tables.strides[1], tables.first_entries[1]
    assert stride >= 2 * levels + 1 > stride // 2
    entries, pairs = tables.coder.tolist(), tables.start_and_frequency.tolist()
    for table, row in enumerate(given.frequencies.tolist()):
        start = 0
        for symbol, frequency in enumerate(row):
            entry, at = entries[first + table * stride + symbol] % (1 << 64), table * TOTAL + start
            assert pairs[first + table * stride + symbol] == (
                start << 16 | frequency if frequency else 0
            )
            assert tables.slot_symbol[1, at : at + frequency].tolist() == [symbol] * frequency
            if frequency:
                assert (entry & 0x1FFF, entry >> 13 & 0xFFF) == (frequency, start)
                for state in (
                    0,
                    1,
                    frequency - 1,
                    frequency,
                    (1 << 31) - 1,
                    (1 << 31) // frequency * frequency - 1,
                ):
                    assert (state * (entry >> 32)) >> (
                        31 + (entry >> 25 & 0x7F)
                    ) == state // frequency
            start += frequency


def test_planes_are_told_where_their_tables_are(tables):
    assert tables.of_planes([7, 1, 127]).tolist() == [
        [7, 1, 16, 16],
        [1, 0, 0, 4],
        [127, 2, 80, 256],
    ]
    with pytest.raises(
        KernelInputError, match="no tables for 5 levels; there are tables for 1, 7, 127"
    ):
        tables.of_planes([7, 5])


@pytest.mark.parametrize(
    "change",
    [
        {"levels": 2},
        {"levels": 128},
        {"choice": np.zeros((2, 3), np.int64)},
        {"frequencies": alphabet(7).frequencies + 1},
        {"frequencies": alphabet(7).frequencies * np.array([1, -1] * 7 + [1])},
        {"frequencies": alphabet(7).frequencies[:3]},
    ],
    ids=str,
)
def test_tables_that_do_not_fit_together_are_refused(change):
    with pytest.raises(KernelInputError, match="levels"):
        CodecTables.of([alphabet(1), SimpleNamespace(**(vars(alphabet(7)) | change))], CPU)
    with pytest.raises(KernelInputError, match="no tables"):
        CodecTables.of([], CPU)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 1, 1, 1, 1),
        (1, 0, 1, 1, 1),
        (1, MAX_TOKENS + 1, 1, 1, 1),
        (1, 1, MAX_CHANNELS + 1, 1, 1),
        (1, 1, 8, 3, 8),
        (1, 1, 8, 128, 8),
        (1, 1, 8, 0, 8),
        (1, 1, 8, 1, 9),
        (1, 1, 8, 1, 0),
        (1, MAX_TOKENS, MAX_CHANNELS, 1, MAX_CHANNELS),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_are_refused(sizes):
    with pytest.raises(KernelInputError):
        CodecShape(*sizes)


def test_numbers_of_a_shape():
    shape = CodecShape(2, 5, 100, 16, 64)
    assert (shape.groups, shape.sections, shape.max_words, shape.sizes) == (
        7,
        2,
        5 * 64 + 64,
        (2, 5, 100),
    )


@pytest.mark.parametrize(
    ("x", "levels"),
    [
        (torch.zeros(1, 2, 3, dtype=torch.float64), (7,)),
        (torch.zeros(2, 3), (7, 7)),
        (torch.zeros(1, 3, 2).transpose(1, 2), (7,)),
        (torch.zeros(1, 0, 3), (7,)),
        (torch.zeros(1, MAX_TOKENS + 1, 1), (7,)),
        (torch.zeros(1, 2, 3), (7, 7)),
        (torch.zeros(1, 2, 3), (0,)),
        (torch.zeros(1, 2, 3), (128,)),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else str(value),
)
def test_kv_that_cannot_be_quantised_is_refused(x, levels):
    with pytest.raises(KernelInputError):
        cachegen_quantize_by_token(x, levels)
    if x.dtype == torch.float64 or x.ndim != 3 or not x.is_contiguous():
        with pytest.raises(KernelInputError, match="expected"):
            cachegen_quantize_by_plane(x, 128)
    for fineness in (0, 1025):
        with pytest.raises(KernelInputError, match=str(fineness)):
            cachegen_quantize_by_plane(torch.zeros(1, 2, 3), fineness)


def test_without_a_device_there_is_no_kernel(tables):
    x = torch.zeros(1, 2, 3)
    with pytest.raises(KernelInputError, match="CUDA"):
        cachegen_quantize_by_token(x, (7,))
    with pytest.raises(KernelInputError, match="CUDA"):
        cachegen_quantize_by_plane(x, 128)
    shape = CodecShape(1, 2, 3, 1, 3)
    with pytest.raises(KernelInputError, match="CUDA"):
        cachegen_encode(torch.zeros(1, 2, 3, dtype=torch.int16), shape, (7,), tables, wraps=True)
    with pytest.raises(KernelInputError, match="CUDA"):
        decode(tables, shape)


def decode(tables, shape, levels=(7,), out_dtype=torch.float32, **changed):
    parts = {
        "shifts": torch.zeros(shape.planes, shape.groups, dtype=torch.int16),
        "shapes": torch.zeros(shape.planes, shape.groups, dtype=torch.uint8),
        "lengths": torch.full((shape.planes * shape.sections,), 64, dtype=torch.int32),
        "words": torch.zeros(64, dtype=torch.int16),
    }
    scales = changed.pop("scales", torch.zeros(shape.planes, shape.tokens, dtype=torch.int32))
    out = torch.zeros(shape.sizes, dtype=out_dtype)
    return cachegen_decode(
        EncodedPlanes(**(parts | changed)), scales, levels, shape, tables, out, by_token=True
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"levels": (7, 7)},
        {"levels": (8,)},
        {"out_dtype": torch.float64},
        {"words": torch.zeros(0, dtype=torch.int16)},
        {"words": torch.zeros(64, dtype=torch.int32)},
        {"shifts": torch.zeros(1, 2, dtype=torch.int16)},
        {"shapes": torch.zeros(1, 3, dtype=torch.int8)},
        {"lengths": torch.zeros(2, dtype=torch.int32)},
        {"scales": torch.zeros(1, 1, dtype=torch.int32)},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_together_are_refused(tables, changed):
    with pytest.raises(KernelInputError, match=r"must be|words|no tables"):
        decode(tables, CodecShape(1, 2, 3, 1, 3), **changed)


def test_values_that_do_not_fit_the_shape_are_refused(tables):
    shape = CodecShape(1, 2, 3, 1, 3)
    with pytest.raises(KernelInputError, match="must be"):
        cachegen_encode(torch.zeros(1, 2, 3, dtype=torch.int32), shape, (7,), tables, wraps=True)
    with pytest.raises(KernelInputError, match="expected 1"):
        cachegen_encode(torch.zeros(1, 2, 3, dtype=torch.int16), shape, (7, 7), tables, wraps=True)
