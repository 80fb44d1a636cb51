"""`cachegen_decode`: kernel, reference and CPU codec alike. Collected by `test_interpreted.py`
only.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.serde import plane_layout
from lmcache_kernels.cachegen_decode import (
    cachegen_decode,
    cachegen_decode_reference,
    random_planes,
)
from lmcache_kernels.codec_shape import DELTA_FLAG, LANES, STATE_WORDS, CodecShape, EncodedPlanes

LEVELS = (15, 7, 127)
PARTS = ("shifts", "shapes", "lengths", "words")
# (planes, tokens, channels), and channels of a section. Rows of whole steps and others, a table for
# each channel (from 64 tokens) and for several, more than a tile (16 tokens, 64 channels), one
# symbol.
BY_TOKEN = (
    ((1, 17, 32), 128, torch.bfloat16),
    ((2, 9, 70), 32, torch.float16),
    ((1, 64, 5), 128, torch.float32),
    ((3, 1, 100), 128, torch.float16),
    ((1, 1, 1), 128, torch.float32),
)
BY_PLANE = (
    ((1, 17, 32), 128, torch.bfloat16),
    ((1, 64, 5), 128, torch.float16),
    ((1, 3, 70), 32, torch.float32),
)
CASES = [(*case, True) for case in BY_TOKEN] + [(*case, False) for case in BY_PLANE]


def on(device, encoded):
    return EncodedPlanes(*(getattr(encoded, name).to(device) for name in PARTS))


@pytest.mark.parametrize(("shape", "section", "dtype", "by_token"), CASES, ids=str)
def test_kernel_and_cpu_read_the_same_values(
    codec, make_kv, same, device, monkeypatch, shape, section, dtype, by_token
):
    monkeypatch.setattr(plane_layout, "SECTION_CHANNELS", section)
    monkeypatch.setattr(plane_layout, "SECTION_TOKENS", 8)
    x = make_kv(dtype, *shape)
    levels = LEVELS[: x.shape[0]] if by_token else (127,) * x.shape[0]
    cut = codec.shape_of(x)
    blob, (scales, by_cpu) = codec.encode(x, levels, by_token)
    out, wanted = torch.full_like(x, -7.0), torch.full_like(x, 9.0, device="cpu")
    status = cachegen_decode(
        on(device, by_cpu), scales.to(device), levels, cut, codec.tables, out, by_token
    )
    expected = cachegen_decode_reference(
        by_cpu, scales, levels, cut, codec.alphabets, wanted, by_token
    )
    assert not status.any()
    assert not expected.any()
    assert same(out, wanted)
    assert same(out, codec.decode(blob, x))


@pytest.mark.parametrize(
    "cut", [(70, 16, 33), (70, 64, 70), (64, 4, 32), (192, 1, 96), (3, 2, 3), (34, 1, 2)], ids=str
)
@pytest.mark.parametrize("by_token", [True, False])
def test_sections_and_groups_may_be_of_any_width(codec, same, device, cut, by_token):
    """Random symbols jump as far as they can: deltas and shifted values leave the range, and are
    folded back into it.
    """
    channels, group, section = cut
    shape, levels = CodecShape(3, 4, channels, group, section), (1, 15, 127)
    encoded = random_planes(shape, levels, codec.alphabets, channels)
    assert channels == 3 or (encoded.shapes >= DELTA_FLAG).any()
    scales = torch.rand(3, 4 if by_token else 1).view(torch.int32)
    out, wanted = torch.full(shape.sizes, -7.0, device=device), torch.full(shape.sizes, 9.0)
    status = cachegen_decode(
        on(device, encoded), scales.to(device), levels, shape, codec.tables, out, by_token
    )
    assert not status.any()
    assert not cachegen_decode_reference(
        encoded, scales, levels, shape, codec.alphabets, wanted, by_token
    ).any()
    assert same(out, wanted)


@pytest.fixture(scope="module")
def in_three_sections(codec, device):
    cut, levels = CodecShape(1, 7, 96, 1, 32), (15,)  # fewer tokens fit the states
    encoded = random_planes(cut, levels, codec.alphabets, seed=3)
    scales = torch.rand(1, 7).view(torch.int32)
    return scales.to(device), levels, cut, on(device, encoded)


def decoded(codec, device, encoded, scales, levels, cut, poison=0):
    """Decode in the middle of poisoned memory: what lies around the words must not matter, what
    lies around the output stays.
    """
    around = torch.full((4096,), poison, dtype=torch.int16, device=device)
    words = torch.cat([around, encoded.words, around])[4096 : 4096 + len(encoded.words)]
    pool = torch.full((cut.tokens * cut.channels + 2048,), 7.0, dtype=torch.bfloat16, device=device)
    out = pool[1024 : 1024 + cut.tokens * cut.channels].view(cut.sizes)
    inside = dataclasses.replace(encoded, words=words)
    status = cachegen_decode(inside, scales, levels, cut, codec.tables, out, by_token=True)
    assert (pool[:1024] == 7.0).all()
    assert (pool[-1024:] == 7.0).all()
    return status.tolist(), out.clone()


def test_a_damaged_stream_is_reported_for_its_section_alone(codec, device, in_three_sections):
    scales, levels, cut, encoded = in_three_sections
    first, second, _ = encoded.lengths.tolist()
    in_states, in_words, last = first + 5, first + LANES * STATE_WORDS + 1, first + second - 1
    for place in (in_states, in_words, last):
        words = encoded.words.clone()
        words[place] ^= 1
        status, _ = decoded(
            codec, device, dataclasses.replace(encoded, words=words), scales, levels, cut
        )
        assert status == [0, 1, 0], place


@pytest.mark.parametrize(
    ("lengths", "status"),
    [
        ((0, -1, 0), (0, 1, 1)),
        ((0, 1, -1), (0, 1, 1)),
        ((0, 0, 1), (0, 0, 1)),
        ((0, 0, 1 << 30), (0, 0, 1)),
        ((-(1 << 30), 0, 0), (1, 1, 1)),
        ((0, -10000, 0), (0, 1, 1)),
        ((1 << 30, 0, 0), (1, 1, 1)),
    ],
    ids=str,
)
def test_wrong_lengths_are_reported_and_lead_nowhere(
    codec, device, in_three_sections, lengths, status
):
    scales, levels, cut, encoded = in_three_sections
    wrong = dataclasses.replace(
        encoded, lengths=encoded.lengths + torch.tensor(lengths, dtype=torch.int32, device=device)
    )
    results = [decoded(codec, device, wrong, scales, levels, cut, poison) for poison in (0, -1)]
    assert results[0][0] == results[1][0] == list(status)
    assert torch.equal(results[0][1].view(torch.int16), results[1][1].view(torch.int16))


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 1 << 30), channels=st.sampled_from([32, 33]), by_token=st.booleans())
def test_any_words_give_the_values_that_the_references_give(
    codec, make_kv, same, device, seed, channels, by_token
):
    random = torch.Generator().manual_seed(seed)
    shape = CodecShape(2, 4, channels, 4, channels)
    lengths = torch.randint(
        LANES * STATE_WORDS,
        4 * channels + LANES * STATE_WORDS,
        (2,),
        dtype=torch.int32,
        generator=random,
    )
    words = torch.randint(
        -(1 << 15), 1 << 15, (int(lengths.sum()),), dtype=torch.int32, generator=random
    ).to(torch.int16)
    shapes = torch.randint(0, 48, (2, shape.groups), generator=random) + 128 * torch.randint(
        0, 2, (2, shape.groups), generator=random
    )
    shifts = torch.randint(-7, 8, (2, shape.groups), dtype=torch.int16, generator=random)
    encoded = EncodedPlanes(shifts, shapes.to(torch.uint8), lengths, words)
    scales = torch.rand(2, 4 if by_token else 1, generator=random).view(torch.int32)
    out, wanted = torch.full(shape.sizes, 7.0, device=device), torch.full(shape.sizes, 9.0)
    status = cachegen_decode(
        on(device, encoded), scales.to(device), (7, 63), shape, codec.tables, out, by_token
    )
    expected = cachegen_decode_reference(
        encoded, scales, (7, 63), shape, codec.alphabets, wanted, by_token
    )
    assert torch.equal(status.cpu(), expected)
    assert same(out, wanted)


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 1 << 30), channels=st.sampled_from([64, 7]))
def test_models_of_any_bytes_lead_nowhere(codec, device, seed, channels):
    """Table numbers and shifts beyond all that there are: some values, and nothing read or
    written outside.
    """
    random = torch.Generator().manual_seed(seed)
    shape = CodecShape(1, 3, channels, 1, channels)
    shapes = torch.randint(0, 256, (1, channels), generator=random).to(torch.uint8)
    shifts = torch.randint(-(1 << 15), 1 << 15, (1, channels), generator=random).to(torch.int16)
    words = torch.randint(-(1 << 15), 1 << 15, (100,), generator=random).to(torch.int16)
    encoded = on(
        device, EncodedPlanes(shifts, shapes, torch.tensor([100], dtype=torch.int32), words)
    )
    scales = (
        torch.randint(-(1 << 31), (1 << 31) - 1, (1, 3), generator=random)
        .to(torch.int32)
        .to(device)
    )
    results = []
    for _ in range(2):
        out = torch.full(shape.sizes, 7.0, device=device)
        with np.errstate(over="ignore", invalid="ignore"):  # scales of any bits, too
            assert cachegen_decode(
                encoded, scales, (127,), shape, codec.tables, out, True
            ).tolist() == [1]
        results.append(out.view(torch.int32))
    assert torch.equal(*results)
