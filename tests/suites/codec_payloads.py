"""Payloads for tests of codecs: KV that looks like KV, and what else a chunk may hold. Needs
numpy, no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, num_bytes
from lmcache_core.record import RecordHeader, TensorSpec, decoded_bytes, payload_digest
from lmcache_core.serde.codec import ChunkCodec, EncodedPayload

from tests.suites.chunks import make_key

TensorCase = tuple[str, tuple[int, ...]]
"""Dtype and shape."""
KV_DTYPES = ("bfloat16", "float16", "float32")
CASES = MappingProxyType(
    {
        "plain": (("bfloat16", (2, 4, 70, 96)),),
        "float16": (("float16", (2, 3, 70, 96)),),
        "float32": (("float32", (2, 3, 70, 96)),),
        "deep": (("bfloat16", (2, 12, 64, 32)),),
        "hybrid": (
            ("bfloat16", (2, 3, 64, 64)),
            ("bfloat16", (2, 2, 96, 32)),
            ("float16", (2, 1, 64, 40)),
        ),
        "latent": (("bfloat16", (1, 3, 80, 72)),),
        "several sides": (("bfloat16", (3, 2, 64, 40)),),
        "one token": (("bfloat16", (2, 2, 1, 1000)),),
        "seven tokens": (("bfloat16", (2, 2, 7, 333)),),
        "63 tokens": (("float16", (2, 2, 63, 65)),),
        "one channel": (("bfloat16", (2, 1, 300, 1)),),
        "one value": (("bfloat16", (1, 1, 1, 1)),),
        "opaque": (("uint8", (60, 100)),),
        "fp8": (("float8_e4m3fn", (2, 2, 65, 64)), ("float8_e5m2", (2, 2, 33, 40))),
        "no KV": (
            ("float32", (40, 50)),
            ("float64", (300,)),
            ("int64", (100,)),
            ("int32", (2, 3)),
            ("int16", (9,)),
            ("int8", (1,)),
        ),
        "odd": (
            ("uint8", (3,)),
            ("bfloat16", (2, 1, 65, 33)),
            ("bool", (5,)),
            ("float32", (1, 2, 66, 3)),
            ("float16", ()),
        ),
        "with an empty one": (
            ("bfloat16", (2, 0, 4, 8)),
            ("bfloat16", (2, 2, 64, 64)),
            ("uint8", (0,)),
        ),
        "more layers than a model has": (("bfloat16", (1, 5000, 1, 8)),),
    }
)
HOSTILE_BITS = MappingProxyType(
    {
        "bfloat16": (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF),
        "float16": (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF),
        "float32": (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF),
    }
)
"""Infinities and NaNs with and without a payload."""
LARGEST_VALUES = MappingProxyType(
    {
        "bfloat16": (1.0, 2.0**100, 3.38e38, 2.0**-100, 2.0**-120),
        "float16": (1.0, 32767.0, 32768.0, 40000.0, 65504.0, 2.0**-14, 2.0**-20),
        "float32": (1.0, 2.0**100, 3.4e38, 2.0**-100, 2.0**-140),
    }
)
"""Usual ones, and those next to the ends of what a dtype can say or a scale may be."""
SIDES = MappingProxyType({"keys": 0, "values": 1, "kv": 0, "kv1": 1, "kv2": 2})
GUARD = b"\xa5" * 64
"""What lies before and after memory that is decoded into."""


def specs_of(*tensors: TensorCase, gap: int = 0) -> tuple[TensorSpec, ...]:
    """Raw tensors of groups `g0`, `g1`, … one after the other, or `gap` bytes apart."""
    specs, at = [], 0
    for i, (dtype, shape) in enumerate(tensors):
        specs.append(TensorSpec(f"g{i}", dtype, shape, at, num_bytes(shape, dtype)))
        at += num_bytes(shape, dtype) + gap
    return tuple(specs)


def kv_payload(specs: Sequence[TensorSpec], seed: int) -> bytes:
    """A payload, the same for the same arguments: of floating-point dtypes values about a mean
    of each channel, else small numbers.
    """
    rng = np.random.default_rng(seed)
    return b"".join(_tensor_bytes(spec, rng) for spec in specs)


def noise_payload(size: int) -> bytes:
    """Bytes that nothing can make smaller."""
    return random.Random(size).randbytes(size)


def values_of(spec: TensorSpec, data: bytes) -> npt.NDArray[np.float64]:
    """Elements of a tensor of one of `KV_DTYPES`, exactly, in its shape."""
    if spec.dtype == "bfloat16":
        words = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
        return words.view(np.float32).astype(np.float64).reshape(spec.shape)
    return (
        np.frombuffer(data, "<f2" if spec.dtype == "float16" else "<f4")
        .astype(np.float64)
        .reshape(spec.shape)
    )


def bits_of_values(spec: TensorSpec, values: npt.NDArray[np.float64]) -> bytes:
    """Values that are numbers of the tensor's dtype, as its bytes."""
    if spec.dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    return values.astype("<f2" if spec.dtype == "float16" else "<f4").tobytes()


def cut_to(dtype: str, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Values rounded to numbers of that dtype, for bfloat16 towards zero."""
    if dtype == "bfloat16":
        return (
            (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000))
            .view(np.float32)
            .astype(np.float64)
        )
    return values.astype(np.float16 if dtype == "float16" else np.float32).astype(np.float64)


def header_of(found: EncodedPayload) -> RecordHeader:
    """The header of its record."""
    key = make_key("codec").key.canonical()
    return RecordHeader(
        key, found.serde, found.profile, found.lossy, found.tensors, payload_digest(found.payload)
    )


def decode_between_guards(
    codec: ChunkCodec, header: RecordHeader, payload: memoryview, shift: int = 0
) -> bytes:
    """Decode into memory with guards on both sides, at an address that is off by `shift`;
    nothing of them may change.
    """
    size = decoded_bytes(header)
    before = bytes(shift) + GUARD
    memory = bytearray(before + b"\xa5" * size + GUARD)
    try:
        codec.decode(header, payload, memoryview(memory)[len(before) : len(before) + size])
    finally:
        assert memory[: len(before)] == before
        assert memory[len(before) + size :] == GUARD
    return bytes(memory[len(before) : len(before) + size])


def resized(found: EncodedPayload, data: bytes) -> EncodedPayload:
    """The same single tensor with other bytes."""
    (spec,) = found.tensors
    other = TensorSpec(spec.group, spec.dtype, spec.shape, 0, len(data))
    return EncodedPayload(
        memoryview(data), (other,), found.serde, found.profile, found.lossy, found.report
    )


def is_large_kv(case: TensorCase) -> bool:
    """Whether a tensor is KV with enough values to be worth a codec."""
    dtype, shape = case
    return dtype in KV_DTYPES and len(shape) == 4 and math.prod(shape[-2:]) >= 2000


def check_reported_errors(
    specs: Sequence[TensorSpec],
    payloads: tuple[bytes, bytes],
    found: EncodedPayload,
    scale_is_of_plane: Callable[[int], bool],
) -> None:
    """Measure the errors of every group of layers once more, in float64, and compare them with the
    report.

    Args:
        specs: The tensors, one after the other.
        payloads: Before and after.
        found: What its encoder reported.
        scale_is_of_plane: Whether errors of so many tokens are relative to the largest value of a
            whole layer, not of each token.
    """
    unit = 1 / 32767
    left = {group.name: group for group in found.report.groups}
    for spec in specs:
        given, got = (data[spec.offset : spec.offset + spec.length] for data in payloads)
        named = {name: group for name, group in left.items() if name.startswith(f"{spec.group} ")}
        if not named:
            assert got == given, "an error that is not reported"
            continue
        before, after = (values_of(spec, data) for data in (given, got))
        assert bits_of_values(spec, after) == got, "restored values are numbers of the dtype"
        axes = (-2, -1) if scale_is_of_plane(spec.shape[2]) else (-1,)
        scale = np.abs(before).max(axis=axes, keepdims=True)
        error, size = (
            np.divide(x, scale, out=np.zeros_like(before), where=scale > 0)
            for x in (np.abs(after - before), before)
        )
        seen = np.zeros(spec.shape[:2], np.int64)
        for name, group in named.items():
            side_name, _, layers = name.removeprefix(f"{spec.group} ").partition(" ")
            first, last = map(int, layers.split("-"))
            place = slice(SIDES[side_name], SIDES[side_name] + 1), slice(first, last + 1)
            seen[place] += 1
            assert abs(group.max_relative - float(error[place].max())) <= unit, name
            rms = (
                math.sqrt(float((error[place] ** 2).sum()) / float((size[place] ** 2).sum()))
                if size[place].any()
                else 0.0
            )
            assert group.rms_relative == pytest.approx(rms, rel=0.01, abs=2 * unit), name
            del left[name]
        assert (seen == 1).all(), "every layer is in one group"
    assert not left, "groups of no tensor"


def _tensor_bytes(spec: TensorSpec, rng: np.random.Generator) -> bytes:
    count = math.prod(spec.shape)
    if spec.dtype in KV_DTYPES:
        values: npt.NDArray[Any] = rng.standard_normal(spec.shape)
        if len(spec.shape) == 4:
            values = values + 3 * rng.standard_normal((*spec.shape[:2], 1, spec.shape[3]))
        return bits_of_values(spec, cut_to(spec.dtype, values))
    if spec.dtype == "bool":
        return bytes(rng.integers(0, 2, count, np.uint8))
    width = DTYPE_ITEMSIZE[spec.dtype]
    data = np.zeros((count, width), np.uint8)
    data[:, 0] = rng.integers(0, 256 if width > 1 else 40, count)
    return data.tobytes()
