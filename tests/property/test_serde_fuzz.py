"""Encoded tensors from anywhere: only `SerdeError` comes of bytes that are none, in bounded
memory; what is taken is what its head says.
"""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde import (
    Deserializer,
    FastDeserializer,
    FastSerializer,
    SafeDeserializer,
    SafeSerializer,
    Serializer,
    TorchDeserializer,
    TorchSerializer,
)

from tests.fuzz.damage import Changes, changed, changes
from tests.suites.serde_suite import bits_of, payload_of, random_bits, sealed_by_hand

DTYPES = tuple(DTYPE_ITEMSIZE)
WRITERS: tuple[type[Serializer], ...] = (TorchSerializer, SafeSerializer, FastSerializer)
READERS: tuple[type[Deserializer], ...] = (TorchDeserializer, SafeDeserializer, FastDeserializer)
NAMES = ("torch", "safetensor", "fast")
GIVEN = random_bits(torch.bfloat16, (2, 3), 0)
ENCODED = tuple(writer().to_bytes(GIVEN) for writer in WRITERS)
MEMORY_BOUND_BYTES = 1 << 20
"""Many times the longest bytes that are read here, and a thousandth of what some of them claim."""

HUGE_SHAPES = ((1 << 30,), (1 << 15, 1 << 15), (1 << 34,), (1 << 62, 2), ((1 << 64) - 1,) * 64)

serdes = st.integers(0, 2)
hostile_sizes = (
    st.integers(0, 4) | st.integers(1 << 20, 1 << 34) | st.integers((1 << 63) - 2, (1 << 64) - 1)
)


def read_within_bounds(serde: int, data: bytes) -> torch.Tensor | None:
    """What the reader makes of the bytes, None if it refuses them; anything else, or much
    memory, fails the test.
    """
    tracemalloc.start()
    try:
        return READERS[serde](None).from_bytes(data)
    except SerdeError:
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY_BOUND_BYTES


@given(serdes, changes)
def test_a_damaged_encoding_is_refused_or_the_same(serde: int, changes: Changes) -> None:
    data = changed(ENCODED[serde], changes)
    found = read_within_bounds(serde, data)
    assert (found is not None) == (data == ENCODED[serde])
    assert found is None or bits_of(found) == bits_of(GIVEN)


@given(
    serdes,
    st.binary(max_size=300),
    st.sampled_from((*DTYPES, "", "complex64")),
    st.lists(hostile_sizes, max_size=66),
)
def test_any_head_under_a_right_digest_is_refused_or_true(
    serde: int, payload: bytes, dtype: str, shape: list[int]
) -> None:
    data = sealed_by_hand(payload, serde=NAMES[serde], dtype=dtype, shape=shape)
    found = read_within_bounds(serde, data)
    if found is not None:
        assert_is_as_its_head_says(found, dtype, tuple(shape))
        assert found.nbytes <= len(payload)


@pytest.mark.parametrize("serde", range(len(READERS)))
def test_an_empty_view_past_the_end_of_its_storage(serde: int) -> None:
    view = torch.empty(1, 0)[1:]
    assert view.storage_offset() > 0
    found = READERS[serde](None).from_bytes(WRITERS[serde]().to_bytes(view))
    assert found.shape == (0, 0)


def assert_is_as_its_head_says(found: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> None:
    assert type(found) is torch.Tensor
    assert (found.dtype, tuple(found.shape)) == (getattr(torch, dtype), shape)
    assert found.untyped_storage().nbytes() == math.prod(shape) * DTYPE_ITEMSIZE[dtype]
    assert found.is_contiguous()


READ_ALL = """
import sys
from pathlib import Path
from lmcache_core.errors import SerdeError
from lmcache_core.serde import FastDeserializer, SafeDeserializer, TorchDeserializer

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmPeak"))

readers = [TorchDeserializer(None), SafeDeserializer(None), FastDeserializer(None)]
before = peak_bytes()
num_taken = [0, 0]
for line in sys.stdin:
    kind, data = line.split()
    for reader in readers:
        try:
            reader.from_bytes(bytes.fromhex(data))
            num_taken[int(kind)] += 1
        except SerdeError:
            pass
print(*num_taken, peak_bytes() - before)
"""


def test_lengths_that_are_claimed_take_no_memory() -> None:
    """All that a process reserves is counted, touched or not, by torch, safetensors or Python."""
    outer, inner = [], []
    for serde, encoded in zip(NAMES, ENCODED, strict=True):
        payload = payload_of(encoded)
        outer += [
            sealed_by_hand(payload, serde=serde, dtype="uint8", shape=shape)
            for shape in HUGE_SHAPES
        ]
        for at in range(0, len(payload) - 12, 4):
            huge = payload[:at] + struct.pack("<I", 1 << 30) + payload[at + 4 :]
            inner.append(sealed_by_hand(huge, serde=serde, dtype="bfloat16", shape=(2, 3)))
    lines = "".join(
        f"{kind} {data.hex()}\n"
        for kind, all_of_kind in enumerate((outer, inner))
        for data in all_of_kind
    )
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL], input=lines, capture_output=True, text=True, check=True
    )
    outer_taken, inner_taken, grown_bytes = map(int, done.stdout.split())
    assert outer_taken == 0
    assert inner_taken < len(inner), (
        "a checksum or a time of an archive's member may be anything, a length may not"
    )
    assert grown_bytes < 64 << 20
