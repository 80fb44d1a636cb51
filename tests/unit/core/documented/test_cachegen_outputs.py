"""The documented outputs of CacheGen as bytes: they come back whole, and nothing else is taken for
one. Damage: `tests/property/test_cachegen_streams.py`.
"""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest
import safetensors.torch
import torch
from lmcache_core.documented.cachegen.outputs import MAX_COUNT
from lmcache_core.errors import SerdeError
from lmcache_core.serde.cachegen import (
    CacheGenConfig,
    CacheGenEncoderOutput,
    CacheGenGPUEncoderOutput,
    encode_function,
)

from tests.suites.serde_suite import sealed_by_hand

MEMORY_BOUND_BYTES = 4 << 20


def gpu_output(tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> CacheGenGPUEncoderOutput:
    kv = torch.randn(2, 2, tokens, 1, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    return encode_function(
        kv, CacheGenConfig.for_num_layers(2), torch.tensor([32, 32]), torch.tensor([32, 32]), 2
    )


def older_output() -> CacheGenEncoderOutput:
    table = torch.arange(4 * 6 * 33, dtype=torch.int16).reshape(4, 6, 33)
    scales = torch.rand(2, 3, 1)
    return CacheGenEncoderOutput(
        b"streams", torch.tensor([0, 3, 4]), table, scales, scales + 1, 2, 3
    )


GPU, OLDER = gpu_output(), older_output()
CHUNK = GPU.data_chunks[0]


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
        )
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(0, torch.float32), (5, torch.bfloat16), (5, torch.float8_e5m2)]
)
def test_an_output_comes_back(tokens: int, dtype: torch.dtype) -> None:
    output = gpu_output(tokens, dtype)
    written = output.to_bytes()
    assert isinstance(written, bytes)
    assert same(CacheGenGPUEncoderOutput.from_bytes(written), output)


def test_an_older_output_comes_back() -> None:
    assert same(CacheGenEncoderOutput.from_bytes(OLDER.to_bytes()), OLDER)
    empty = dataclasses.replace(
        OLDER, bytestream=b"", start_indices=torch.tensor([], dtype=torch.int32)
    )
    assert same(CacheGenEncoderOutput.from_bytes(empty.to_bytes()), empty)


def file_of(name: str = "cachegen_gpu", numbers: object = (1, 1), **changes: object) -> bytes:
    """An empty output with some other tensors, under a right digest; None takes one away."""
    tensors = {
        "cdf": torch.zeros(0, 1, 5, dtype=torch.int16),
        "max_tensors_key": torch.zeros(0, 0, 1),
        "max_tensors_value": torch.zeros(0, 0, 1),
        "numbers": torch.tensor(numbers),
    } | changes
    file = safetensors.torch.save({k: v for k, v in tensors.items() if v is not None})
    return sealed(file, name)


def sealed(file: bytes, name: str = "cachegen_gpu") -> bytes:
    return sealed_by_hand(file, serde=name, dtype="uint8", shape=[len(file)])


def header_of(text: str, data: bytes = b"") -> bytes:
    """A file with that header."""
    return sealed(len(text).to_bytes(8, "little") + text.encode() + data)


HOSTILE_FILES = {
    "nested deeply": header_of('{"a":' * 10_000),
    "a dtype of half a byte": header_of(
        '{"cdf":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"1"
    ),
    "sizes whose product is too large": header_of(
        '{"cdf":{"dtype":"I16","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}}'
    ),
    "a number too large": file_of(numbers=[MAX_COUNT + 1, 1]),
    "numbers that are none": file_of(numbers=[1.5, 1.0]),
    "too few numbers": file_of(numbers=[1]),
    "too many tensors": file_of(more=torch.zeros(1)),
    "a chunk without tensors": file_of(numbers=[1, 1, 0]),
    "too few dimensions": file_of(cdf=torch.zeros(0, 1, dtype=torch.int16)),
    "other channels": file_of(numbers=[1, 2]),
    "tokens without a chunk": file_of(
        max_tensors_key=torch.zeros(0, 7, 1), max_tensors_value=torch.zeros(0, 7, 1)
    ),
    "scales that differ": file_of(max_tensors_value=torch.zeros(0, 0, 1).half()),
    "the older kind": file_of("cachegen_encoder"),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_a_hostile_file_under_a_right_digest_is_refused(name: str) -> None:
    CacheGenGPUEncoderOutput.from_bytes(file_of())
    data = HOSTILE_FILES[name]
    tracemalloc.start()
    try:
        for read in (CacheGenGPUEncoderOutput.from_bytes, CacheGenEncoderOutput.from_bytes):
            with pytest.raises(SerdeError):
                read(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BOUND_BYTES
    finally:
        tracemalloc.stop()


def chunks(**changes: object) -> dict[str, object]:
    return {"data_chunks": [dataclasses.replace(CHUNK, **changes), *GPU.data_chunks[1:]]}


@pytest.mark.parametrize(
    ("output", "change"),
    [
        (GPU, {"num_heads": 2}),
        (GPU, {"max_tensors_value": GPU.max_tensors_value[:1]}),
        (GPU, {"data_chunks": GPU.data_chunks[:-1]}),
        (GPU, chunks(bytestream_lengths=CHUNK.bytestream_lengths[:1])),
        (OLDER, {"start_indices": torch.ones(1)}),
        (OLDER, {"head_size": 4}),
    ],
)
def test_an_output_that_no_reader_would_take_is_not_written(output, change) -> None:
    with pytest.raises(SerdeError):
        dataclasses.replace(output, **change).to_bytes()


def test_an_output_owns_its_memory() -> None:
    written = bytearray(GPU.to_bytes())
    read = CacheGenGPUEncoderOutput.from_bytes(memoryview(written))
    written[:] = bytes(len(written))
    assert same(read, GPU)
