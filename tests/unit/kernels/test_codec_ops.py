"""What `cachegen_decode` refuses, and its tables; no kernel runs here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmcache_kernels import KernelInputError
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.codec_shape import (
    MAX_CHANNELS,
    MAX_TOKENS,
    PRECISION_BITS,
    CodecShape,
    EncodedPlanes,
)
from lmcache_kernels.codec_tables import MAX_KEPT, CodecTables

CPU = torch.device("cpu")
TOTAL = 1 << PRECISION_BITS


def alphabet(levels, num_tables=4, seed=0):
    random = np.random.default_rng(seed)
    rows = random.integers(1, 9, (num_tables, 2 * levels + 1))
    rows[0, 0] = 0
    rows[:, levels] += TOTAL - rows.sum(1)
    return SimpleNamespace(levels=levels, frequencies=rows)


@pytest.fixture
def tables():
    return CodecTables.of([alphabet(1), alphabet(7), alphabet(127)], CPU)


def test_planes_find_their_tables(tables):
    assert tables.of_planes([7, 1, 127]).tolist() == [
        [7, 1, 16, 16],
        [1, 0, 0, 4],
        [127, 2, 80, 256],
    ]
    with pytest.raises(
        KernelInputError, match="no tables for 5 levels; there are tables for 1, 7, 127"
    ):
        tables.of_planes([7, 5])


def test_facts_about_planes_are_sent_once(tables):
    """For each kind of chunk: the host would wait for the device each time."""
    assert tables.of_planes([7, 1]) is tables.of_planes((7, 1))
    kinds = [[level] * count for level in tables.levels for count in range(1, MAX_KEPT)]
    found = [tables.of_planes(kind).tolist() for kind in kinds]
    assert found == [tables.of_planes(kind).tolist() for kind in kinds]
    assert tables.of_planes(kinds[-1]) is not tables.of_planes(kinds[-1]), "their number is bounded"


@pytest.mark.parametrize(
    "change",
    [
        {"levels": 2},
        {"levels": 128},
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


def test_without_a_device_there_is_no_kernel(tables):
    with pytest.raises(KernelInputError, match="CUDA"):
        decode(tables, CodecShape(1, 2, 3, 1, 3))


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
