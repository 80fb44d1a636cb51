"""The bytes of a blob and the shapes that are cut from it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.serde.blob import HEAD, Head, Mode, Reader, next_power_of_two
from lmcache_core.serde.cachegen import MAX_LAYERS
from lmcache_core.serde.chunk_codec import Profile, error_groups, quantiser_of
from lmcache_core.serde.plane_layout import MAX_CHANNELS, MAX_TOKENS, PlaneLayout
from lmcache_core.serde.quantised_blob import (
    can_be_quantised,
)


def test_a_head_is_these_bytes() -> None:
    data = Head(Mode.BY_PLANE, 1, 2, (3, 4, 5, 0xFFFFFFFF)).pack()
    assert data == b"KVB1" + bytes([3, 1, 2, 0]) + struct.pack("<4I", 3, 4, 5, 0xFFFFFFFF)
    head = Reader(memoryview(data)).head()
    assert (head.mode, head.dtype, head.itemsize, head.sizes) == (
        Mode.BY_PLANE,
        1,
        2,
        (3, 4, 5, 0xFFFFFFFF),
    )
    assert len(data) == HEAD.size == 24


@pytest.mark.parametrize(("at", "byte"), [(0, 0), (3, 50), (4, 4), (4, 255), (7, 1)])
def test_what_is_no_head_is_refused(at: int, byte: int) -> None:
    data = bytearray(Head(Mode.STORED, 0, 0, (0, 0, 0, 0)).pack())
    data[at] = byte
    with pytest.raises(SerdeError, match="later version"):
        Reader(memoryview(data)).head()


def test_reading_ends_where_the_bytes_end() -> None:
    reader = Reader(memoryview(bytes(range(10))))
    assert bytes(reader.take(3)) == b"\0\1\2"
    assert reader.array("<u2", 2).tolist() == [0x0403, 0x0605]
    assert reader.left == 3
    for count in (4, -1, 1 << 70):
        with pytest.raises(SerdeError, match="ends where"):
            reader.take(count)
    with pytest.raises(SerdeError, match="ends where"):
        reader.array("<u8", 1 << 62)
    with pytest.raises(SerdeError, match="3 bytes too many"):
        reader.finish()
    assert bytes(reader.take(3)) == b"\7\10\11"
    reader.finish()
    assert bytes(reader.take(0)) == b""


def test_arrays_are_aligned_and_views_where_they_can_be() -> None:
    data = bytearray(np.arange(64, dtype=np.uint8).tobytes())
    for shift in range(8):
        array = Reader(memoryview(data)[shift:]).array("<u8", 3)
        assert array.flags.aligned
        assert array.tobytes() == bytes(data[shift : shift + 24])


@pytest.mark.parametrize(
    ("number", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)]
)
def test_powers_of_two(number: int, expected: int) -> None:
    assert next_power_of_two(number) == expected


@pytest.mark.parametrize(
    ("tokens", "channels", "group", "section", "widths"),
    [
        (256, 1024, 1, 128, [128] * 8),
        (128, 300, 1, 128, [128, 128, 44]),
        (127, 300, 1, 256, [256, 44]),
        (64, 128, 1, 128, [128]),
        (63, 130, 2, 130, [130]),
        (7, 5000, 16, 4096, [4096, 904]),
        (1, 100_000, 64, 16384, [16384] * 6 + [1696]),
        (MAX_TOKENS, 1, 1, 1, [1]),
    ],
)
def test_planes_are_cut_by_their_shape_alone(
    tokens: int, channels: int, group: int, section: int, widths: list[int]
) -> None:
    layout = PlaneLayout(3, tokens, channels)
    assert (layout.group, layout.section, layout.widths) == (group, section, widths)
    assert layout.groups == -(-channels // group)
    assert layout.sections == len(widths)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 1, 1),
        (1, 0, 1),
        (1, 1, 0),
        (1, MAX_TOKENS + 1, 1),
        (1, 1, MAX_CHANNELS + 1),
        ((1 << 16) + 1, 1, 1),
    ],
)
def test_what_is_no_plane_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(SerdeError, match="cannot be quantised"):
        PlaneLayout(*sizes)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("bfloat16", (2, 32, 256, 1024), True),
        ("float16", (1, 61, 256, 576), True),
        ("float32", (1, 1, 1, 1), True),
        ("float64", (2, 32, 256, 1024), False),
        ("float8_e4m3fn", (2, 32, 256, 1024), False),
        ("bfloat16", (2, 32, 256, 8, 128), False),
        ("bfloat16", (0, 32, 256, 1024), False),
        ("bfloat16", (2, 32, 0, 1024), False),
        ("bfloat16", (2, MAX_LAYERS, 1, 8), True),
        ("bfloat16", (1, MAX_LAYERS + 1, 1, 8), False),
        ("bfloat16", (2, 2, MAX_TOKENS + 1, 1), False),
        ("bfloat16", (2, 2, 1, MAX_CHANNELS + 1), False),
        ("bfloat16", (2, 32, 1 << 15, 1 << 10), False),
    ],
)
def test_what_can_be_quantised(dtype: str, shape: tuple[int, ...], expected: bool) -> None:
    assert can_be_quantised(dtype, shape) == expected


def test_the_documented_bins() -> None:
    shallow, deep = (
        quantiser_of(Profile.STANDARD, (2, 9, 256, 8)),
        quantiser_of(Profile.STANDARD, (2, 12, 256, 8)),
    )
    assert (shallow.mode, shallow.levels) == (Mode.BY_TOKEN, (15,) * 18)
    assert (deep.mode, deep.levels) == (
        Mode.BY_TOKEN,
        (15,) * 10 + (7,) * 2 + (15,) * 2 + (7,) * 10,
    )
    assert quantiser_of(Profile.STANDARD, (1, 12, 256, 8)).levels == (15,) * 10 + (7,) * 2
    for profile in (Profile.HIGH, Profile.LOW):
        assert quantiser_of(profile, (2, 12, 63, 8)) == quantiser_of(
            Profile.STANDARD, (2, 12, 63, 8)
        )
        assert quantiser_of(profile, (2, 12, 64, 8)).mode is Mode.BY_PLANE


def test_errors_are_told_of_layers_that_are_quantised_alike() -> None:
    assert error_groups(Profile.STANDARD, (2, 12, 256, 8)) == [
        ("keys 0-9", slice(0, 10)),
        ("keys 10-11", slice(10, 12)),
        ("values 0-1", slice(12, 14)),
        ("values 2-11", slice(14, 24)),
    ]
    assert error_groups(Profile.HIGH, (2, 12, 256, 8)) == [
        ("keys 0-11", slice(0, 12)),
        ("values 0-11", slice(12, 24)),
    ]
    assert error_groups(Profile.LOW, (1, 3, 256, 8)) == [("kv 0-2", slice(0, 3))]
    names = [name for name, _ in error_groups(Profile.LOW, (4, 3, 256, 8))]
    assert len(set(names)) == 4
