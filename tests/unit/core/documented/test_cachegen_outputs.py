"""Outputs as bytes: they come back whole, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import logging
import tracemalloc

import msgspec
import pytest
import torch
from lmcache_core.documented.cachegen.outputs import MAX_COUNT, MAX_DATA_CHUNKS
from lmcache_core.errors import SerdeError
from lmcache_core.serde import FastSerializer
from lmcache_core.serde.cachegen import (
    CacheGenConfig,
    CacheGenEncoderOutput,
    CacheGenGPUBytestream,
    CacheGenGPUEncoderOutput,
    encode_function,
)

MEMORY_BOUND_BYTES = 4 << 20
FAST = FastSerializer()


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


def sealed(message: object) -> bytes:
    """Any message, with a right digest."""
    data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return FAST.to_bytes(torch.tensor(list(data), dtype=torch.uint8))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_an_output_comes_back(tokens: int, dtype: torch.dtype) -> None:
    output = gpu_output(tokens, dtype)
    written = output.to_bytes()
    assert isinstance(written, bytes)
    assert same(CacheGenGPUEncoderOutput.from_bytes(written), output)
    assert output.to_bytes() == written


def test_an_older_output_comes_back() -> None:
    assert same(CacheGenEncoderOutput.from_bytes(OLDER.to_bytes()), OLDER)
    empty = dataclasses.replace(
        OLDER, bytestream=b"", start_indices=torch.tensor([], dtype=torch.int32)
    )
    assert same(CacheGenEncoderOutput.from_bytes(empty.to_bytes()), empty)


@pytest.mark.parametrize("wrapped", [bytes, bytearray, memoryview])
def test_any_bytes_are_read_and_not_kept(wrapped) -> None:
    written = bytearray(GPU.to_bytes())
    read = CacheGenGPUEncoderOutput.from_bytes(wrapped(written))
    written[:] = bytes(len(written))
    assert same(read, GPU)
    read.cdf.zero_()


def test_tensors_with_gaps_are_written_as_their_copies() -> None:
    gapped = dataclasses.replace(GPU, cdf=GPU.cdf.repeat_interleave(2, dim=2)[:, :, ::2])
    assert not gapped.cdf.is_contiguous()
    assert gapped.to_bytes() == GPU.to_bytes()


def test_the_message_is_pinned() -> None:
    chunk = CacheGenGPUBytestream(
        torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8),
        torch.tensor([[4], [4]], dtype=torch.int32),
        1,
    )
    table = torch.tensor([[[0, 7, -1]]] * 2, dtype=torch.int16)
    scale = torch.tensor([[[1.5]]], dtype=torch.bfloat16)
    written = CacheGenGPUEncoderOutput([chunk], table, scale, -scale, 1, 1).to_bytes()
    tensors = (table, scale, -scale, chunk.bytestream, chunk.bytestream_lengths)
    assert written == sealed(["channel_streams", [1, 1, 1], [FAST.to_bytes(t) for t in tensors]])


def test_devices_are_logged(caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="lmcache_core.documented.cachegen.outputs"):
        GPU.debug_print_device()
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 6
    assert all("cpu" in record.message for record in caplog.records)


@pytest.mark.parametrize("output", [GPU, OLDER], ids=["streams of channels", "streams"])
def test_damage_is_noticed(output) -> None:
    """By the container; its own tests damage every byte."""
    written = output.to_bytes()
    read = type(output).from_bytes
    for position in range(0, len(written), 7):
        damaged = bytearray(written)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(SerdeError):
            read(damaged)
    for other in (b"", written[:20], written[:-1], written + b"\0", written + written):
        with pytest.raises(SerdeError):
            read(other)


def test_one_output_is_not_taken_for_the_other() -> None:
    with pytest.raises(SerdeError, match="kind"):
        CacheGenEncoderOutput.from_bytes(GPU.to_bytes())
    with pytest.raises(SerdeError, match="kind"):
        CacheGenGPUEncoderOutput.from_bytes(OLDER.to_bytes())


KIND = "channel_streams"
TABLE = FAST.to_bytes(torch.zeros(0, 1, 5, dtype=torch.int16))
SCALE = FAST.to_bytes(torch.zeros(0, 0, 1))


def message(*tensors: object, numbers: object = (1, 1), kind: str = KIND) -> list[object]:
    return [kind, numbers, tensors or (TABLE, SCALE, SCALE)]


def table_of(*shape: int, dtype: torch.dtype = torch.int16) -> list[object]:
    """A message whose first tensor is another one."""
    return message(FAST.to_bytes(torch.zeros(shape, dtype=dtype)), SCALE, SCALE)


def scales_of(*scales: torch.Tensor) -> list[object]:
    return message(TABLE, *(FAST.to_bytes(scale) for scale in scales))


HOSTILE_MESSAGES = {
    "nothing": b"",
    "no message": b"\xc1",
    "a long list of nothing": b"\xdd\xff\xff\xff\xff",
    "a long list inside": b"\x93\xafchannel_streams\xdd\xff\xff\xff\xff",
    "a long list of tensors": b"\x93\xafchannel_streams\x92\x01\x01\xdd\xff\xff\xff\xff",
    "a long tensor": b"\x93\xafchannel_streams\x92\x01\x01\x91\xc6\xff\xff\xff\xff",
    "a long text": b"\x93\xdb\xff\xff\xff\xff",
    "no text": b"\x93\xa1\x80\x90\x90",
    "nested deeply": b"\x91" * (1 << 20),
    "an object": {"kind": KIND},
    "too few fields": [KIND, [1, 1]],
    "too many fields": [*message(), 1],
    "negative": message(numbers=[-1, -1]),
    "a number too large": message(numbers=[MAX_COUNT + 1, 1]),
    "a number that is none": message(numbers=[1.5, 1]),
    "too many numbers": message(numbers=[1] * (MAX_DATA_CHUNKS + 3)),
    "too few numbers": message(numbers=[1]),
    "too few tensors": message(SCALE, SCALE),
    "a chunk without tensors": message(numbers=[1, 1, 0]),
    "a tensor that is none": message(b"LMTB", SCALE, SCALE),
    "a damaged tensor": message(TABLE[:-1] + b"\1", SCALE, SCALE),
    "another dtype": table_of(0, 1, 5, dtype=torch.int32),
    "too few dimensions": table_of(0, 1),
    "other channels": message(numbers=[1, 2]),
    "other layers": table_of(2, 1, 5),
    "tokens without a chunk": scales_of(torch.zeros(0, 7, 1), torch.zeros(0, 7, 1)),
    "scales that differ": scales_of(torch.zeros(0, 0, 1), torch.zeros(0, 0, 1).half()),
    "scales of whole numbers": scales_of(*[torch.zeros(0, 0, 1, dtype=torch.int32)] * 2),
    "another kind": message(kind="other"),
    "older": message(kind="streams"),
}


@pytest.mark.parametrize("name", HOSTILE_MESSAGES)
def test_a_hostile_message_under_a_right_digest(name: str) -> None:
    data = sealed(HOSTILE_MESSAGES[name])
    tracemalloc.start()
    try:
        for read in (CacheGenGPUEncoderOutput.from_bytes, CacheGenEncoderOutput.from_bytes):
            with pytest.raises(SerdeError):
                read(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BOUND_BYTES
    finally:
        tracemalloc.stop()


def test_what_the_hostile_messages_differ_from_is_read() -> None:
    read = CacheGenGPUEncoderOutput.from_bytes(sealed(message()))
    assert (read.cdf.shape, read.data_chunks) == ((0, 1, 5), [])


def chunks(**changes: object) -> dict[str, object]:
    return {"data_chunks": [dataclasses.replace(CHUNK, **changes), *GPU.data_chunks[1:]]}


@pytest.mark.parametrize(
    ("output", "change"),
    [
        (GPU, {"num_heads": 2}),
        (GPU, {"num_heads": -1, "head_size": -3}),
        (GPU, {"cdf": GPU.cdf.int()}),
        (GPU, {"cdf": GPU.cdf[:2]}),
        (GPU, {"max_tensors_key": GPU.max_tensors_key.int()}),
        (GPU, {"max_tensors_value": GPU.max_tensors_value[:1]}),
        (GPU, {"data_chunks": GPU.data_chunks[:-1]}),
        (GPU, chunks(ntokens=-2)),
        (GPU, chunks(ntokens=2.0)),
        (GPU, chunks(bytestream=CHUNK.bytestream.int())),
        (GPU, chunks(bytestream_lengths=CHUNK.bytestream_lengths[:1])),
        (
            GPU,
            {
                "data_chunks": GPU.data_chunks
                + [dataclasses.replace(CHUNK, ntokens=0)] * MAX_DATA_CHUNKS
            },
        ),
        (OLDER, {"start_indices": torch.ones(1)}),
        (OLDER, {"head_size": 4}),
    ],
)
def test_what_could_not_be_read_is_not_written(output, change) -> None:
    with pytest.raises(SerdeError):
        dataclasses.replace(output, **change).to_bytes()
