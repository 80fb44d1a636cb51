"""The kernels of `cachegen_quantize` against their reference and the CPU codec, bit for bit.
Collected by `test_interpreted.py` only.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.serde.quantised_blob import NotQuantisableError
from lmcache_kernels.cachegen_quantize import (
    cachegen_quantize_by_plane,
    cachegen_quantize_by_plane_reference,
    cachegen_quantize_by_token,
    cachegen_quantize_by_token_reference,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FINENESS = 144


def check_equal(got, expected):
    for name in ("values", "scales", "errors", "status"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name).cpu()), name


def cases(*shapes, wide):
    """Each shape in every dtype; one that takes several tiles in one."""
    each = [(dtype, shape) for shape in shapes for dtype in DTYPES]
    return pytest.mark.parametrize(("dtype", "shape"), [*each, (torch.bfloat16, wide)], ids=str)


@cases((3, 3, 33), (1, 1, 1), (2, 5, 70), wide=(1, 2, 1030))
def test_by_token_is_the_reference_and_the_cpu_codec(codec, make_kv, dtype, shape):
    x, levels = make_kv(dtype, *shape), (15, 7, 127)[: shape[0]]
    got = cachegen_quantize_by_token(x, levels)
    check_equal(got, cachegen_quantize_by_token_reference(x, levels))
    assert not got.status.any()
    _, errors, (scales, _) = codec.encode(x, levels, by_token=True)
    assert torch.equal(got.errors.cpu(), torch.from_numpy(errors))
    assert torch.equal(got.scales.cpu(), scales)


@cases((2, 9, 33), (1, 3, 70), wide=(1, 2, 1030))
def test_by_plane_is_the_reference_and_the_cpu_codec(codec, make_kv, dtype, shape):
    x = make_kv(dtype, *shape)
    got = cachegen_quantize_by_plane(x, FINENESS)
    check_equal(got, cachegen_quantize_by_plane_reference(x, FINENESS))
    assert not got.status.any()
    _, errors, (scales, _) = codec.encode(x, (127,) * shape[0], by_token=False)
    assert torch.equal(got.errors.cpu(), torch.from_numpy(errors))
    assert torch.equal(got.scales.cpu(), scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_by_token_go_to_the_even_neighbour(device, dtype):
    """The largest value is 15 and there are 15 levels: values stand for themselves, plus 15."""
    x = torch.tensor([15, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 14.5, -14.5], dtype=dtype, device=device)
    got = cachegen_quantize_by_token(x.view(1, 1, -1), (15,))
    assert got.values.flatten().tolist() == [15, 1, 1, 3, -1, -1, -3, 15, -15]


def test_halves_by_plane_go_to_the_even_neighbour(device):
    """Channels that never change, and 32,767 as the largest value: the step is the smallest, 1."""
    x = torch.tensor([32767, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], device=device).repeat(1, 3, 1)
    got = cachegen_quantize_by_plane(x, FINENESS)
    assert got.scales.view(torch.float32).tolist() == [[1.0]]
    assert got.values[0, 1].tolist() == [32767, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_cannot_be_divided_by_is_told_of_its_plane_alone(codec, make_kv, dtype):
    unusable = (float("inf"), float("-inf"), float("nan"), 2.0**-101, 2.0**101, 1e-45)
    # every other plane is an ordinary one
    values = (None, *unusable, None, -(2.0**-100), 2.0**100, 0.0, -0.0, None)
    x = make_kv(dtype, len(values), 2, 3)
    for plane, value in enumerate(values):
        if value is not None:
            x[plane] = 0.0
            x[plane, 1, 2] = value
    # the smallest float32 is zero as a bfloat16
    is_wrong = [int(value in unusable and x[i, 1, 2].item() != 0) for i, value in enumerate(values)]
    levels = (15,) * len(values)
    by_token = (
        cachegen_quantize_by_token(x, levels),
        cachegen_quantize_by_token_reference(x, levels),
    )
    by_plane = (
        cachegen_quantize_by_plane(x, FINENESS),
        cachegen_quantize_by_plane_reference(x, FINENESS),
    )
    for got, wanted in (by_token, by_plane):
        assert got.status.tolist() == is_wrong
        for plane in range(len(values)):
            if not is_wrong[plane]:
                assert torch.equal(got.values[plane], wanted.values[plane])
                assert torch.equal(got.errors[plane], wanted.errors[plane])
                assert torch.equal(got.scales[plane], wanted.scales[plane])
    for plane, wrong in enumerate(is_wrong):
        if wrong:
            with pytest.raises(NotQuantisableError):
                codec.encode(x[plane : plane + 1], (15,), by_token=True)


@pytest.mark.parametrize(
    ("value", "is_usable"), [(2.0**15, True), (2.0**15 + 32, False), (65504.0, False)]
)
def test_float16_that_might_be_restored_as_infinity_is_told(codec, device, value, is_usable):
    x = torch.linspace(-3000, 3000, 27, device=device).half().view(1, 9, 3)
    x[0, 5, 1] = value
    assert cachegen_quantize_by_token(x, (15,)).status.tolist() == [0]
    by_plane = cachegen_quantize_by_plane(x, 1024)
    assert (
        by_plane.status.tolist()
        == cachegen_quantize_by_plane_reference(x, 1024).status.tolist()
        == [0 if is_usable else 1]
    )
    if is_usable:
        check_equal(by_plane, cachegen_quantize_by_plane_reference(x, 1024))
        codec.encode(x, (127,), by_token=False)
    else:
        with pytest.raises(NotQuantisableError):
            codec.encode(x, (127,), by_token=False)


def test_what_is_not_finite_in_float16_is_told(make_kv):
    x = make_kv(torch.float16, 2, 3, 5)
    x[0, 0, 0] = float("inf")
    assert cachegen_quantize_by_token(x, (15, 15)).status.tolist() == [1, 0]
    assert cachegen_quantize_by_plane(x, FINENESS).status.tolist() == [1, 0]


@settings(deadline=None, max_examples=12)
@given(
    bits=st.lists(st.integers(0, 65535), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    levels=st.sampled_from([1, 15, 127]),
    fineness=st.integers(1, 1024),
)
def test_any_finite_bits_are_quantised_alike(device, bits, dtype, levels, fineness):
    x = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 2, 3).to(device)
    for got, expected in (
        (
            cachegen_quantize_by_token(x, (levels,)),
            cachegen_quantize_by_token_reference(x, (levels,)),
        ),
        (
            cachegen_quantize_by_plane(x, fineness),
            cachegen_quantize_by_plane_reference(x, fineness),
        ),
    ):
        assert torch.equal(got.status, expected.status)
        if not got.status.any():
            check_equal(got, expected)
