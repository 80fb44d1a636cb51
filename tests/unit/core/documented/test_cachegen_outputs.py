"""Outputs as bytes: they come back whole, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import logging
import struct
import tracemalloc

import msgspec
import pytest
import torch
import xxhash
from lmcache_core.documented.cachegen.outputs import (
    MAX_DATA_CHUNKS,
    MAX_EXTENT,
    MAX_HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
)
from lmcache_core.errors import SerdeError
from lmcache_core.serde.cachegen import (
    CacheGenConfig,
    CacheGenEncoderOutput,
    CacheGenGPUBytestream,
    CacheGenGPUEncoderOutput,
    encode_function,
)

PREFIX = struct.Struct("<4sB3xI4xQ")
BODY_AT = PREFIX.size + 16
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


def sealed(head: object, payload: bytes = b"") -> bytes:
    """A container with a right digest around anything."""
    encoded = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    prefix = PREFIX.pack(b"LMCG", 1, len(encoded), len(payload))
    return prefix + xxhash.xxh3_128_digest(prefix + encoded + payload) + encoded + payload


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_an_output_comes_back(tokens: int, dtype: torch.dtype) -> None:
    output = gpu_output(tokens, dtype)
    written = output.to_bytes()
    assert isinstance(written, bytes)
    assert same(CacheGenGPUEncoderOutput.from_bytes(written), output)
    assert output.to_bytes() == written


def test_an_older_output_comes_back() -> None:
    output = older_output()
    assert same(CacheGenEncoderOutput.from_bytes(output.to_bytes()), output)
    empty = dataclasses.replace(
        output, bytestream=b"", start_indices=torch.tensor([], dtype=torch.int32)
    )
    assert same(CacheGenEncoderOutput.from_bytes(empty.to_bytes()), empty)


@pytest.mark.parametrize("wrapped", [bytes, bytearray, memoryview])
def test_any_bytes_are_read_and_not_kept(wrapped) -> None:
    written = bytearray(gpu_output().to_bytes())
    read = CacheGenGPUEncoderOutput.from_bytes(wrapped(written))
    written[:] = bytes(len(written))
    assert same(read, gpu_output())
    read.cdf.zero_()


def test_tensors_with_gaps_are_written_as_their_copies() -> None:
    output = gpu_output()
    gapped = dataclasses.replace(output, cdf=output.cdf.repeat_interleave(2, dim=2)[:, :, ::2])
    assert not gapped.cdf.is_contiguous()
    assert gapped.to_bytes() == output.to_bytes()


def test_the_container_is_pinned() -> None:
    chunk = CacheGenGPUBytestream(
        torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8),
        torch.tensor([[4], [4]], dtype=torch.int32),
        1,
    )
    table = torch.tensor([[[0, 7, -1]]] * 2, dtype=torch.int16)
    scale = torch.tensor([[[1.5]]], dtype=torch.bfloat16)
    written = CacheGenGPUEncoderOutput([chunk], table, scale, -scale, 1, 1).to_bytes()
    head = [
        "channel_streams",
        [1, 1, 1],
        [
            ["int16", [2, 1, 3]],
            ["bfloat16", [1, 1, 1]],
            ["bfloat16", [1, 1, 1]],
            ["uint8", [8]],
            ["int32", [2, 1]],
        ],
    ]
    payload = bytes.fromhex("00000700ffff 00000700ffff c03f c0bf 0102030405060708 0400000004000000")
    assert written == sealed(head, payload)


def test_devices_are_logged(caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="lmcache_core.documented.cachegen.outputs"):
        gpu_output().debug_print_device()
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 6
    assert all("cpu" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "output", [gpu_output(2), older_output()], ids=["streams of channels", "streams"]
)
def test_every_damage_is_noticed(output) -> None:
    written = output.to_bytes()
    read = type(output).from_bytes
    for position in range(len(written)):
        damaged = bytearray(written)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(SerdeError):
            read(damaged)
    for length in range(len(written)):
        with pytest.raises(SerdeError):
            read(written[:length])
    for more in (b"\0", written):
        with pytest.raises(SerdeError):
            read(written + more)
    with pytest.raises(SerdeError, match="gaps"):
        read(memoryview(written)[::2])


def test_one_output_is_not_taken_for_the_other() -> None:
    with pytest.raises(SerdeError, match="kind"):
        CacheGenEncoderOutput.from_bytes(gpu_output().to_bytes())
    with pytest.raises(SerdeError, match="kind"):
        CacheGenGPUEncoderOutput.from_bytes(older_output().to_bytes())


KIND = "channel_streams"
SCALES = [["float32", [0, 0, 1]]] * 2
EMPTY_TABLE = ["int16", [0, 1, 5]]
RIGHT = [EMPTY_TABLE, *SCALES]


def head(*tensors: object, numbers: object = (1, 1), kind: str = KIND) -> list[object]:
    return [kind, numbers, tensors or RIGHT]


def table_of(dtype: str, *shape: int) -> list[object]:
    """A head whose first tensor is said to be so."""
    return head([dtype, shape], *SCALES)


HOSTILE_HEADS = {
    "nothing": b"",
    "no message": b"\xc1",
    "a long list of nothing": b"\xdd\xff\xff\xff\xff",
    "a long list inside": b"\x93\xafchannel_streams\xdd\xff\xff\xff\xff",
    "a long list of tensors": b"\x93\xafchannel_streams\x92\x01\x01\xdd\xff\xff\xff\xff",
    "a long shape": b"\x93\xafchannel_streams\x92\x01\x01\x91\x92\xa5uint8\xdd\xff\xff\xff\xff",
    "a long text": b"\x93\xdb\xff\xff\xff\xff",
    "no text": b"\x93\xa1\x80\x90\x90",
    "nested deeply": b"\x91" * MAX_HEAD_BYTES,
    "an object": {"kind": KIND},
    "too few fields": [KIND, [1, 1]],
    "too many fields": [*head(), 1],
    "negative": head(numbers=[-1, -1]),
    "a number too large": head(numbers=[1 << 50, 1]),
    "a number that is none": head(numbers=[1.5, 1]),
    "too many numbers": head(numbers=[1] * (MAX_DATA_CHUNKS + 3)),
    "too few numbers": head(numbers=[1]),
    "too few tensors": head(*SCALES),
    "a chunk without tensors": head(numbers=[1, 1, 0]),
    "an unknown dtype": table_of("object", 0, 1, 5),
    "an attribute of torch": table_of("load", 0, 1, 5),
    "a bool": table_of("bool", 0, 1, 5),
    "another dtype": table_of("int32", 0, 1, 5),
    "too many dimensions": table_of("int16", 0, 1, 5, 1, 1),
    "too few dimensions": table_of("int16", 0, 1),
    "empty but endless": table_of("int16", 0, 1 << 40, 1 << 40),
    "larger than the payload": table_of("int16", 2, 1, MAX_EXTENT // 2),
    "other channels": head(numbers=[1, 2]),
    "other layers": head(["int16", [2, 0, 5]], *SCALES, numbers=[1, 0]),
    "tokens without a chunk": head(EMPTY_TABLE, *[["float32", [0, 7, 1]]] * 2),
    "scales that differ": head(EMPTY_TABLE, ["float32", [0, 0, 1]], ["float16", [0, 0, 1]]),
    "scales of whole numbers": head(EMPTY_TABLE, *[["int32", [0, 0, 1]]] * 2),
    "another kind": head(kind="other"),
    "older": head(kind="streams"),
}


@pytest.mark.parametrize("name", HOSTILE_HEADS)
def test_a_hostile_head_under_a_right_digest(name: str) -> None:
    data = sealed(HOSTILE_HEADS[name])
    tracemalloc.start()
    try:
        for read in (CacheGenGPUEncoderOutput.from_bytes, CacheGenEncoderOutput.from_bytes):
            with pytest.raises(SerdeError):
                read(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BOUND_BYTES
    finally:
        tracemalloc.stop()


def test_what_the_hostile_heads_differ_from_is_read() -> None:
    read = CacheGenGPUEncoderOutput.from_bytes(sealed(head()))
    assert (read.cdf.shape, read.data_chunks) == ((0, 1, 5), [])


@pytest.mark.parametrize(
    "prefix",
    [
        (b"LMKV", 1, 0, 0),
        (b"LMCG", 0, 0, 0),
        (b"LMCG", 2, 0, 0),
        (b"LMCG", 1, MAX_HEAD_BYTES + 1, 0),
        (b"LMCG", 1, 2**32 - 1, 2**64 - 1),
        (b"LMCG", 1, 0, MAX_PAYLOAD_BYTES + 1),
        (b"LMCG", 1, 1, 0),
    ],
)
def test_a_hostile_prefix(prefix: tuple[bytes, int, int, int]) -> None:
    with pytest.raises(SerdeError):
        CacheGenGPUEncoderOutput.from_bytes(PREFIX.pack(*prefix) + bytes(16))


@pytest.mark.parametrize("position", [5, 6, 7, 12, 13, 14, 15])
def test_what_must_be_zero_is_zero(position: int) -> None:
    written = bytearray(gpu_output().to_bytes())
    written[position] = 1
    written[PREFIX.size : BODY_AT] = xxhash.xxh3_128_digest(
        written[: PREFIX.size] + written[BODY_AT:]
    )
    with pytest.raises(SerdeError, match="zero"):
        CacheGenGPUEncoderOutput.from_bytes(written)


GPU, OLDER = gpu_output(), older_output()
CHUNK = GPU.data_chunks[0]


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
        (OLDER, {"start_indices": torch.ones([1] * 5, dtype=torch.int32)}),
        (OLDER, {"head_size": 4}),
    ],
)
def test_what_could_not_be_read_is_not_written(output, change) -> None:
    with pytest.raises(SerdeError):
        dataclasses.replace(output, **change).to_bytes()
