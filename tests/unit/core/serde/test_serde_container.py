"""The head in front of every payload: its bytes, its bounds, and what it refuses under a right
digest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde import FastDeserializer, FastSerializer
from lmcache_core.serde.tensor_bytes import DTYPE_CODES, SerdeId, TensorHead, contiguous_strides

from tests.suites.serde_suite import sealed_by_hand

FAST, UINT8, FLOAT32, BOOL = 3, 11, 2, 12
# The numbers of dtypes are in stored bytes: they may be added to, never changed.
WRITTEN_CODES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
)
GOLDEN = "4c4d5442010304020400000000000000010000000000000002000000000000003827ad8e12facefc466dd8efb02a7f90803f00c0"  # noqa: E501


def fast(payload: bytes, **fields: object) -> bytes:
    return sealed_by_hand(
        payload, **({"serde": FAST, "dtype": UINT8, "shape": (len(payload),)} | fields)
    )


def test_the_bytes_are_pinned() -> None:
    assert (
        FastSerializer().to_bytes(torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)).hex() == GOLDEN
    )


def test_every_dtype_has_its_number() -> None:
    assert {name: number for number, name in enumerate(WRITTEN_CODES.split(), 1)} == DTYPE_CODES
    assert DTYPE_CODES.keys() == DTYPE_ITEMSIZE.keys()


def test_a_container_made_by_hand_is_read() -> None:
    found = FastDeserializer(None).from_bytes(
        fast(struct.pack("<3f", 1, 2, 3), dtype=FLOAT32, shape=(3, 1))
    )
    assert torch.equal(found, torch.tensor([[1.0], [2.0], [3.0]]))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "0 bytes are too short"),
        (fast(b"1")[:15], "15 bytes are too short"),
        (fast(b"1", magic=b"LMKV"), "not an encoded tensor of version 1: .* 4c4d4b56"),
        (fast(b"1", version=2), "not an encoded tensor of version 1: .* 4c4d544202"),
        (fast(b"1", serde=0), "encoded by serde 0, read as FAST"),
        (fast(b"1", serde=255), "encoded by serde 255, read as FAST"),
        (fast(b"1", dtype=0), "dtype 0 with 1 dimensions"),
        (fast(b"1", dtype=13), "dtype 13 with 1 dimensions"),
        (fast(b"1", shape=(1,) * 65), "dtype 11 with 65 dimensions"),
        (fast(b"1", shape=(2,)), "a payload of 1 bytes for 2 bytes of tensor"),
        (fast(b"123", shape=(2,)), "a payload of 3 bytes for 2 bytes of tensor"),
        (fast(b"1", dtype=FLOAT32, shape=()), "a payload of 1 bytes for 4 bytes of tensor"),
        (fast(b"1", payload_bytes=2), "by its head"),
        (fast(b"1", payload_bytes=(1 << 64) - 1), "by its head"),
        (fast(b"1") + b"1", "by its head"),
        (fast(b"1", shape=((1 << 64) - 1,)), "product of its sizes"),
        (fast(b"", shape=(0, 1 << 57)), "product of its sizes"),
        (fast(b"", shape=(1 << 40, 1 << 40, 0)), "product of its sizes"),
        (fast(b"1", shape=((1 << 64) - 1,) * 64), "product of its sizes"),
        (fast(b"1", shape=(1 << 40,)), "bytes of tensor; at most 4294967296"),
        (fast(b"\0\1\2", dtype=BOOL), "neither 0 nor 1"),
        (fast(b"1")[:-1] + b"2", "digest"),
    ],
)
def test_what_is_no_encoding_is_refused_with_the_reason(data: bytes, match: str) -> None:
    with pytest.raises(SerdeError, match=match):
        FastDeserializer(None).from_bytes(data)


def test_the_longest_container_counts_its_head() -> None:
    longest = (4 << 30) - (16 + 8 + 16)
    assert TensorHead(SerdeId.FAST, "uint8", (longest,), longest).fault() is None
    assert "bytes of tensor; at most" in str(
        TensorHead(SerdeId.FAST, "uint8", (longest + 1,), longest + 1).fault()
    )


@pytest.mark.parametrize(
    ("serde", "envelope_bytes"),
    [(SerdeId.FAST, 0), (SerdeId.SAFETENSOR, 64 << 10), (SerdeId.TORCH, 64 << 10)],
)
def test_the_envelope_is_bounded(serde: SerdeId, envelope_bytes: int) -> None:
    assert TensorHead(serde, "int16", (3,), 6 + envelope_bytes).fault() is None
    for payload_bytes in (5, 7 + envelope_bytes):
        assert f"a payload of {payload_bytes} bytes for 6" in str(
            TensorHead(serde, "int16", (3,), payload_bytes).fault()
        )


def test_bytes_with_gaps_are_refused() -> None:
    data = FastSerializer().to_bytes(torch.zeros(2))
    with_gaps = memoryview(bytes(b for byte in data for b in (byte, 0)))[::2]
    assert bytes(with_gaps) == data
    with pytest.raises(ValueError, match="gaps"):
        FastDeserializer(None).from_bytes(with_gaps)


def test_bytes_in_other_units_are_read() -> None:
    given = torch.arange(4, dtype=torch.float64)
    data = FastSerializer().to_bytes(given)
    assert len(data) % 8 == 0
    assert torch.equal(
        FastDeserializer(None).from_bytes(memoryview(bytearray(data)).cast("d")), given
    )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.empty((1 << 57, 0)), "product of its sizes"),
        (
            lambda: torch.zeros(1, dtype=torch.uint8).expand((4 << 30) + 1),
            "4294967297 bytes of tensor; at most 4294967296",
        ),
        (lambda: torch.zeros(1).expand((1,) * 65), "65 dimensions; at most 64"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.zeros(2, device="meta"), "on meta"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8), "quint8"),
        (
            lambda: torch.nested.nested_tensor(
                [torch.zeros(2), torch.zeros(3)], layout=torch.strided
            ),
            "layout",
        ),
    ],
    ids=["extent", "length", "dimensions", "sparse", "meta", "quantized", "nested"],
)
@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors"
)
def test_a_tensor_out_of_bounds_is_refused_before_it_is_copied(
    make: Callable[[], torch.Tensor], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        FastSerializer().to_bytes(make())


@pytest.mark.parametrize("given", [None, b"bytes", [1.0, 2.0]])
def test_what_is_no_tensor_is_refused(given: torch.Tensor) -> None:
    with pytest.raises(
        TypeError, match=f"{type(given).__name__} cannot be encoded: give a torch.Tensor"
    ):
        FastSerializer().to_bytes(given)


@pytest.mark.parametrize(
    "lazily",
    [torch.tensor([1 + 2j]).conj().imag, torch._neg_view(torch.tensor([2.0]))],
    ids=["part", "whole"],
)
def test_a_lazily_negated_tensor_is_encoded_with_its_values(lazily: torch.Tensor) -> None:
    assert lazily.is_neg()
    assert FastSerializer().to_bytes(lazily) == FastSerializer().to_bytes(torch.tensor([-2.0]))


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 70), (0, 0), (1, 2, 3, 4)])
def test_strides_are_as_torch_counts_them(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()
