"""Any tensors through any codec: what comes back is what went in, or as near as the report says."""

from __future__ import annotations

import functools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.record import TensorSpec
from lmcache_core.serde import create_codec
from lmcache_core.serde.codec import ChunkCodec

from tests.suites.codec_payloads import (
    KV_DTYPES,
    bits_of_values,
    check_reported_errors,
    cut_to,
    decode_between_guards,
    header_of,
    specs_of,
    values_of,
)

NAMES = ("cachegen", "cachegen:high", "cachegen:low", "lossless")
SHORT = 64
"""Profiles of our own quantise by token below so many tokens."""

names = st.sampled_from(NAMES)
kv_shapes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 11),
    st.sampled_from([1, 2, 7, 63, 64, 65, 129]),
    st.integers(1, 40),
)
any_shapes = st.lists(st.integers(0, 7), max_size=5).map(tuple)
exponents = st.tuples(st.integers(-20, 12), st.integers(0, 12))


@functools.cache
def opened(name: str) -> ChunkCodec:
    codec = create_codec(name, threads=2)
    assert codec is not None
    codec.open()
    return codec


def kv(spec: TensorSpec, seed: int, sizes: tuple[int, int], num_zeros: int) -> bytes:
    """Finite values of sizes from 2^low on, over a range of powers of two, some rows and columns
    of them zero.
    """
    rng = np.random.default_rng(seed)
    low, span = sizes
    values = rng.standard_normal(spec.shape) * 2.0 ** (
        low + rng.integers(0, span + 1, (*spec.shape[:2], 1, spec.shape[3]))
    )
    values = np.clip(values, -30_000, 30_000)
    for _ in range(num_zeros):
        values[:, :, rng.integers(spec.shape[2])] = 0
        values[..., rng.integers(spec.shape[3])] = 0
    return bits_of_values(spec, cut_to(spec.dtype, values))


@settings(deadline=None)
@given(
    names,
    st.sampled_from(KV_DTYPES),
    kv_shapes,
    st.integers(0, 1 << 30),
    exponents,
    st.integers(0, 3),
)
def test_kv_comes_back_as_near_as_is_reported(
    name: str, dtype: str, shape: tuple[int, ...], seed: int, sizes: tuple[int, int], num_zeros: int
) -> None:
    codec = opened(name)
    specs = specs_of((dtype, shape))
    payload = kv(specs[0], seed, sizes, num_zeros)
    found = codec.encode(specs, memoryview(payload))
    if found is None:
        return
    assert len(found.payload) < len(payload)
    raw = decode_between_guards(codec, header_of(found), found.payload)
    if found.lossy:
        assert np.isfinite(values_of(specs[0], raw)).all()
        check_reported_errors(
            specs, (payload, raw), found, lambda tokens: name != "cachegen" and tokens >= SHORT
        )
        again = codec.encode(specs, memoryview(payload))
        assert again is not None
        assert bytes(again.payload) == bytes(found.payload)
    else:
        assert raw == payload


@settings(deadline=None)
@given(
    names,
    st.lists(st.tuples(st.sampled_from(list(DTYPE_ITEMSIZE)), any_shapes | kv_shapes), max_size=4),
    st.integers(0, 9),
    st.integers(0, 1 << 30),
)
def test_any_bits_come_back_or_are_left_alone(
    name: str, tensors: list[tuple[str, tuple[int, ...]]], gap: int, seed: int
) -> None:
    """Bits of all kinds: among them values that are not finite in nearly every tensor, which are
    then kept exactly.
    """
    codec = opened(name)
    specs = specs_of(*tensors, gap=gap)
    size = sum(spec.length + gap for spec in specs)
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, size, np.uint8) & np.uint8(rng.choice([0xFF, 0x0F, 0x81]))
    found = codec.encode(specs, memoryview(payload.tobytes()))
    if found is None:
        return
    assert len(found.payload) < size
    raw = decode_between_guards(codec, header_of(found), found.payload)
    lossy = {group.name.split()[0] for group in found.report.groups}
    at = 0
    for spec in specs:
        if spec.group not in lossy:
            assert (
                raw[at : at + spec.length]
                == payload[spec.offset : spec.offset + spec.length].tobytes()
            )
        at += spec.length
    assert at == len(raw)
    assert found.lossy == bool(lossy)
    assert all(
        math.isfinite(number)
        for group in found.report.groups
        for number in (group.max_relative, group.rms_relative)
    )
