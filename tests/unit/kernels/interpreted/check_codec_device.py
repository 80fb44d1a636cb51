"""Whole blobs by the kernel and by the CPU codec: the same values, the same refusals. Collected by
`test_interpreted.py` only.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.record import RecordHeader, TensorSpec
from lmcache_core.serde.blob import HEAD
from lmcache_core.serde.device import DeviceDecoder

SIZES = (2, 1, 3, 34)
LEVELS = (15, 7)


@pytest.fixture
def decode(device):
    """Decodes a blob of a tensor of that shape and dtype on the device; None if its streams are
    not those of an encoder.
    """
    decoder = DeviceDecoder(device)

    def decode(blob: bytes, shape=SIZES, dtype=torch.bfloat16) -> torch.Tensor | None:
        spec = TensorSpec("", str(dtype).removeprefix("torch."), shape, 0, len(blob))
        header = RecordHeader(b"", "cachegen", "", True, (spec,), b"")
        out = torch.empty(shape, dtype=dtype, device=device)
        status = decoder.begin(header, memoryview(blob), out.view(-1).view(torch.uint8))
        return None if status.any() else out

    return decode


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
def test_one_blob_for_both(codec, decode, make_kv, same, shape, dtype, by_token):
    x = make_kv(dtype, shape[0] * shape[1], *shape[2:])
    blob, _ = codec.encode(x, (15, 7, 127)[: len(x)] if by_token else (127,) * len(x), by_token)
    assert same(decode(blob, shape, dtype).flatten(0, 1), codec.decode(blob, x))


@pytest.fixture
def blob(codec, make_kv):
    return codec.encode(make_kv(torch.bfloat16, 2, 3, 34), LEVELS, by_token=True)[0]


def refused_alike(codec, decode, blob: bytes) -> str:
    """That both refuse it; the reason."""
    with pytest.raises(SerdeError) as refusal:
        codec.decode(blob, torch.zeros(2, 3, 34, dtype=torch.bfloat16))
    try:
        assert decode(blob) is None
    except SerdeError as exc:
        return str(exc)
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
def test_damaged_blobs_are_refused(codec, decode, blob, place, value, reason):
    at = place % len(blob)
    assert reason in refused_alike(codec, decode, blob[:at] + value + blob[at + len(value) :])


def test_short_blobs_are_refused(codec, decode, blob):
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
        refused_alike(codec, decode, blob[:length])


def test_bytes_that_are_changed_anywhere_are_refused_or_decode_alike(codec, decode, blob, same):
    x = torch.zeros(2, 3, 34, dtype=torch.bfloat16)
    random = np.random.default_rng(5)
    for place in random.integers(0, len(blob), 25).tolist():
        changed = (
            blob[:place] + bytes([blob[place] ^ int(random.integers(1, 256))]) + blob[place + 1 :]
        )
        try:
            wanted = codec.decode(changed, x)
        except SerdeError:
            refused_alike(codec, decode, changed)
        else:
            assert same(decode(changed).view(2, 3, 34), wanted)
