"""Whole blobs by kernels and by the CPU codec: the same bytes, values, refusals. Collected by
`test_interpreted.py` only.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.serde.blob import HEAD, Mode
from lmcache_core.serde.chunk_codec import SHORT_TOKENS, Profile, quantiser_of
from lmcache_core.serde.device import (
    decode_on_device,
    device_tables,
    encode_on_device,
)
from lmcache_core.serde.quantised_blob import NotQuantisableError, Quantiser

FINENESS = 144
SIZES = (2, 1, 3, 34)
LEVELS = (15, 7)


def joined(pieces) -> bytes:
    return b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)


def quantiser_for(shape, by_token):
    planes = shape[0] * shape[1]
    return (
        Quantiser(Mode.BY_TOKEN, (15, 7, 127)[:planes])
        if by_token
        else Quantiser(Mode.BY_PLANE, (127,) * planes, FINENESS)
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "by_token"),
    [
        ((3, 1, 3, 32), torch.bfloat16, True),
        ((1, 2, 2, 33), torch.float16, True),
        ((1, 1, 64, 5), torch.float16, True),  # each channel with a table of its own
        ((2, 1, 1, 5), torch.float32, True),
        ((1, 1, 9, 8), torch.bfloat16, False),
        ((1, 1, 3, 20), torch.float16, False),
        ((1, 2, 2, 7), torch.float32, False),
    ],
    ids=str,
)
def test_one_blob_for_both(codec, make_kv, same, shape, dtype, by_token):
    x = make_kv(dtype, shape[0] * shape[1], *shape[2:]).view(shape)
    quantiser = quantiser_for(shape, by_token)
    pieces, errors = encode_on_device(x, quantiser, codec.tables)
    by_cpu, errors_by_cpu, _ = codec.encode(x.flatten(0, 1), quantiser.levels, by_token)
    assert joined(pieces) == by_cpu
    assert np.array_equal(errors, errors_by_cpu)
    back = decode_on_device(memoryview(by_cpu), shape, dtype, codec.tables)
    assert tuple(back.shape) == shape
    assert same(back.flatten(0, 1), codec.decode(by_cpu, x.flatten(0, 1)))


@pytest.mark.parametrize("profile", Profile)
def test_every_profile_has_kernels(codec, make_kv, profile):
    x = make_kv(torch.bfloat16, 2, 5, 6).view(2, 1, 5, 6)
    quantiser = quantiser_of(profile, (2, 1, SHORT_TOKENS, 6))
    pieces, errors = encode_on_device(x, quantiser, codec.tables)
    back = decode_on_device(memoryview(joined(pieces)), x.shape, x.dtype, codec.tables)
    furthest = (back.float() - x.float()).abs().flatten(2).amax(2).flatten()
    largest = x.float().abs().flatten(2).amax(2).flatten()
    assert torch.all(furthest.cpu() <= (torch.from_numpy(errors[:, 0]) + 1) / 32767 * largest.cpu())


def test_strides_are_free(codec, make_kv):
    x = make_kv(torch.bfloat16, 2, 3, 34).view(SIZES)
    apart = torch.stack([x, torch.zeros_like(x)], 3)[:, :, :, 0]
    assert not apart.is_contiguous()
    both = [
        joined(encode_on_device(kv, Quantiser(Mode.BY_TOKEN, LEVELS), codec.tables)[0])
        for kv in (x, apart)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("by_token", [True, False])
def test_what_cannot_be_quantised_is_refused(codec, make_kv, by_token):
    x = make_kv(torch.bfloat16, 1, 3, 5).view(1, 1, 3, 5)
    x[0, 0, 1, 4] = float("nan")
    with pytest.raises(NotQuantisableError):
        encode_on_device(x, quantiser_for(x.shape, by_token), codec.tables)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 3, 4), torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 2, 3, dtype=torch.uint8)],
    ids=str,
)
def test_what_is_no_kv_is_refused(codec, x):
    with pytest.raises(SerdeError, match="cannot be quantised"):
        encode_on_device(x, Quantiser(Mode.BY_TOKEN, LEVELS), codec.tables)


@pytest.fixture
def blob(codec, make_kv):
    return codec.encode(make_kv(torch.bfloat16, 2, 3, 34), LEVELS, by_token=True)[0]


def refused_alike(codec, blob: bytes) -> str:
    """That both refuse it; the kernels' reason."""
    with pytest.raises(SerdeError):
        codec.decode(blob, torch.zeros(2, 3, 34, dtype=torch.bfloat16))
    with pytest.raises(SerdeError) as refusal:
        decode_on_device(memoryview(blob), SIZES, torch.bfloat16, codec.tables)
    return str(refusal.value)


SCALES = HEAD.size + 2
SHIFTS = SCALES + 2 * 2 * 3
SHAPES = SHIFTS + 2 * 2 * 2
LENGTHS = SHAPES + 2 * 2


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, b"X", "not an encoded tensor"),
        (4, b"\x00", "mode STORED"),
        (5, b"\x02", "dtype 2"),
        (6, b"\x04", "dtype"),
        (8, b"\x03", "sizes"),
        (HEAD.size, b"\x05", "5 levels"),
        (SCALES + 1, b"\xff", "scale"),
        (SCALES, b"\x80\x7f", "scale"),
        (SHAPES, b"\x7f", "names table 127"),
        (SHAPES, b"\xb0", "names table 48"),
        (LENGTHS, b"\x00\x00", "impossible length"),
        (LENGTHS + 2, b"\x01", "impossible length"),
        (-1, b"\x00\x00", "too many"),
        (-1, b"\xee", "not those of an encoder"),
    ],
    ids=str,
)
def test_damaged_blobs_are_refused(codec, blob, place, value, reason):
    at = place % len(blob)
    assert reason in refused_alike(codec, blob[:at] + value + blob[at + len(value) :])


def test_short_blobs_are_refused(codec, blob):
    for length in (
        0,
        HEAD.size - 1,
        HEAD.size,
        SCALES + 3,
        LENGTHS,
        LENGTHS + 9,
        len(blob) - 2,
        len(blob) - 1,
    ):
        refused_alike(codec, blob[:length])


def test_bytes_that_are_changed_anywhere_are_refused_or_decode_alike(codec, blob, same):
    x = torch.zeros(2, 3, 34, dtype=torch.bfloat16)
    random = np.random.default_rng(5)
    for place in random.integers(0, len(blob), 25).tolist():
        changed = (
            blob[:place] + bytes([blob[place] ^ int(random.integers(1, 256))]) + blob[place + 1 :]
        )
        try:
            wanted = codec.decode(changed, x)
        except SerdeError:
            refused_alike(codec, changed)
        else:
            assert same(
                decode_on_device(memoryview(changed), SIZES, torch.bfloat16, codec.tables).view(
                    2, 3, 34
                ),
                wanted,
            )


def test_tables_are_those_of_the_codec(codec, device):
    tables = device_tables(codec.set, device)
    assert tables.levels == codec.set.levels
    assert tables.num_tables == 48
