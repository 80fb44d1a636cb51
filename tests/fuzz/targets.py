"""What is fuzzed, and what it is fuzzed with first: each target takes any bytes and lets out only
what its documentation says it raises.

Bytes stand for what is inside the checksums: a target puts the right ones around them, because no
fuzzer guesses those.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.documented.cachegen.outputs import CacheGenGPUEncoderOutput
from lmcache_core.documented.cachegen.serializer import CacheGenDeserializer, CacheGenSerializer
from lmcache_core.documented.cachegen.streams import decode_function_gpu, encode_function
from lmcache_core.errors import LayoutError, ProtocolError, RecordError, SerdeError
from lmcache_core.keys import CacheEngineKey, Lane
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, num_bytes
from lmcache_core.record import (
    HEAD_ALIGN_BYTES,
    PREFIX_BYTES,
    RecordHeader,
    TensorSpec,
    decode_head,
    decode_prefix,
    decoded_bytes,
    decoded_header,
)
from lmcache_core.serde import (
    FastDeserializer,
    FastSerializer,
    SafeDeserializer,
    SafeSerializer,
    TorchDeserializer,
    TorchSerializer,
)
from lmcache_core.serde.cachegen import CacheGenConfig
from lmcache_core.serde.chunk_codec import CacheGenCodec, Profile
from lmcache_core.serde.codec import CACHEGEN_SERDE, encoding_report
from lmcache_core.serde.tables import bell_curves
from lmcache_core.wire import messages
from lmcache_core.wire.frames import HEADER_BYTES, WITH_RECORD, FrameType
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures import pods
from tests.fixtures.time_bound import cpu_bound
from tests.suites.chunks import make_record
from tests.suites.codec_payloads import decode_between_guards, kv_payload, specs_of
from tests.suites.serde_suite import payload_of, random_bits, sealed_by_hand

MAX_DECODED_BYTES = 1 << 20
"""Heads that claim more are not decoded: a reader bounds what it allocates before.
"""
MAX_REVIEW_S = 15.0
TENSORS = (
    ("bfloat16", (2, 2, 5, 6)),
    ("float32", (1, 1, 64, 3)),
    ("float16", (2, 1, 65, 2)),
    ("bfloat16", (1, 12, 1, 70)),
    ("uint8", (90,)),
    ("float64", (2, 0, 3)),
)
ENCODINGS = tuple(
    (fmt, serde, f"standard@{bell_curves().id}" if serde == CACHEGEN_SERDE else "")
    for fmt in ("", "vllm", "huggingface")
    for serde in ("naive", "lossless", CACHEGEN_SERDE)
)
"""What an encoding of the CacheGen serde may say of itself."""
_METADATA = LMCacheEngineMetadata("m", 1, 0, "vllm", torch.bfloat16, (2, 2, 5, 1, 6))


@dataclass(frozen=True)
class Target:
    """Something that reads bytes.

    Attributes:
        run: Reads them; what it raises is a finding.
        seeds: What the fuzzer begins with.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]


def read_container(data: bytes) -> None:
    """A container of the Torch, Safe, Fast or CacheGen serde: two bits say which, one whether
    the rest is taken as it is.
    """
    if len(data) < 4:
        return
    number, is_whole = data[0] & 3, bool(data[0] & 4)
    dtype, num_dimensions = list(DTYPE_ITEMSIZE)[data[1] % len(DTYPE_ITEMSIZE)], data[2] % 6
    shape, payload = data[3 : 3 + num_dimensions], data[3 + num_dimensions :]
    details = ENCODINGS[data[1] % len(ENCODINGS)] if number == 3 else ()
    serde = ("torch", "safetensor", "fast", "cachegen")[number]
    whole = (
        data[1:]
        if is_whole
        else sealed_by_hand(payload, serde=serde, dtype=dtype, shape=list(shape), details=details)
    )
    try:
        found = _readers()[number].from_bytes(whole)
    except SerdeError:
        return
    assert type(found) is torch.Tensor
    assert is_whole or (tuple(found.shape), found.dtype) == (
        tuple(shape),
        getattr(torch, dtype),
    )
    assert found.untyped_storage().nbytes() == found.nbytes


def seeds_of_containers() -> Iterator[bytes]:
    """One encoding of each serde and dtype, whole, and taken out of its container."""
    writers = (
        TorchSerializer(),
        SafeSerializer(),
        FastSerializer(),
        CacheGenSerializer(LMCacheEngineConfig.from_defaults(), _METADATA),
    )
    for number, writer in enumerate(writers):
        for i, dtype in enumerate(DTYPE_ITEMSIZE):
            shape = (2, 2, 5, 1, 6) if number == 3 and i % 2 else (2, 3)
            whole = writer.to_bytes(random_bits(getattr(torch, dtype), shape, i))
            yield bytes([number | 4]) + whole
            yield bytes([number, i, len(shape), *shape]) + payload_of(whole)


def read_blob(data: bytes) -> None:
    """The payload of a chunk: one byte says of which tensor, the rest is its blob."""
    decode_blob(_codec(), data)


def decode_blob(codec: CacheGenCodec, data: bytes) -> None:
    """Decode a blob twice, between guards and over other bytes, and compare."""
    if not data:
        return
    dtype, shape = TENSORS[data[0] % len(TENSORS)]
    spec = TensorSpec("", dtype, shape, 0, len(data) - 1)
    header = RecordHeader(b"", CACHEGEN_SERDE, f"low@{bell_curves().id}", True, (spec,), b"")
    try:
        found = decode_between_guards(codec, header, memoryview(data)[1:])
    except SerdeError:
        return
    again = bytearray(num_bytes(shape, dtype))
    codec.decode(header, memoryview(data)[1:], memoryview(again))
    assert found == again, "a value depends on what was in memory"


def seeds_of_blobs() -> Iterator[bytes]:
    """Each tensor in each profile, and damaged in front, where a few bytes say most."""
    for profile in (*Profile, None):
        codec = CacheGenCodec(profile, 1)
        codec.open()
        for i, tensor in enumerate(TENSORS):
            specs = specs_of(tensor)
            found = codec.encode(specs, memoryview(kv_payload(specs, i)))
            if found is not None:
                yield bytes([i]) + bytes(found.payload)
        codec.close()
    for i, (dtype, shape) in enumerate(TENSORS):
        yield bytes([i]) + b"KVB1" + bytes(20) + bytes(num_bytes(shape, dtype))


def read_gpu_output(data: bytes) -> None:
    """The file of a CacheGen output. What can be read is decoded."""
    try:
        output = CacheGenGPUEncoderOutput.from_bytes(
            sealed_by_hand(data, serde="cachegen_gpu", dtype="uint8", shape=[len(data)])
        )
    except SerdeError:
        return
    assert CacheGenGPUEncoderOutput.from_bytes(output.to_bytes()).to_bytes() == output.to_bytes()
    num_layers, num_channels, _ = output.cdf.shape
    num_tokens = output.max_tensors_key.shape[1]
    if num_layers * num_channels * max(num_tokens, 1) > MAX_DECODED_BYTES:
        return
    target = torch.full((num_tokens, num_layers * num_channels), 0x5A, dtype=torch.uint8)
    try:
        keys, values = decode_function_gpu(
            output.cdf, output.data_chunks, num_layers // 2, max(num_tokens, 1), target
        )
    except (SerdeError, LayoutError):
        return
    assert keys.shape == values.shape == (num_layers // 2, num_tokens, num_channels)


def seeds_of_gpu_outputs() -> Iterator[bytes]:
    """Outputs of several shapes, in one data chunk and in more."""
    for layers, tokens, heads, size, chunk_size in (
        (1, 3, 1, 2, 8),
        (2, 9, 2, 3, 4),
        (12, 1, 1, 1, 1),
        (1, 0, 1, 1, 1),
    ):
        config = CacheGenConfig.for_num_layers(layers)
        bins = torch.tensor(config.bins_of_keys()), torch.tensor(config.bins_of_values())
        kv = torch.randn(
            (layers, 2, tokens, heads, size), generator=torch.Generator().manual_seed(tokens)
        ).to(torch.bfloat16)
        yield payload_of(encode_function(kv, config, *bins, chunk_size).to_bytes())


def read_record_head(data: bytes) -> None:
    """The header of a record; the last two bytes say how long the payload is."""
    if len(data) < 2:
        return
    header, (payload_bytes,) = data[:-2], struct.unpack("<H", data[-2:])
    units = -(-(PREFIX_BYTES + len(header) + 16) // HEAD_ALIGN_BYTES)
    covered = struct.pack("<4sHHIIQ", b"LMKV", 1, units, len(header), 0, payload_bytes) + header
    covered += bytes(units * HEAD_ALIGN_BYTES - 16 - len(covered))
    try:
        found, length = decode_head(covered + xxhash.xxh3_128_digest(covered))
    except RecordError:
        return
    assert length == payload_bytes
    found.check(payload_bytes)
    assert isinstance(found.engine_key(), CacheEngineKey)
    report = encoding_report(found)
    assert report is None or report.raw_bytes is not None
    try:
        size = decoded_bytes(found)
    except RecordError:
        return
    assert sum(spec.length for spec in decoded_header(found).tensors) == size


def seeds_of_record_heads() -> Iterator[bytes]:
    """A plain one, and an encoded one with a report."""
    record = make_record("a")
    prefix = decode_prefix(record[:PREFIX_BYTES])
    yield record[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes] + struct.pack(
        "<H", prefix.payload_bytes
    )
    header, _ = decode_head(record[: prefix.head_bytes])
    specs = (TensorSpec("g", "bfloat16", (2, 3), 0, 7), TensorSpec("", "uint8", (), 7, 3))
    report = msgspec.msgpack.encode([3.5, 13, 10, [["g keys 0-1", 0.1, 0.2]]])
    fields = [
        header.key,
        "cachegen",
        "low@0123456789abcdef",
        True,
        specs,
        header.digest,
        [[1, False, report], [9, False, b""]],
    ]
    yield msgspec.msgpack.encode(fields) + struct.pack("<H", 10)


def read_message(data: bytes) -> None:
    """What a frame of the sidecar's socket or of lm:// carries: a byte says of which type."""
    if not data:
        return
    frame_type = FRAME_TYPES[data[0] % len(FRAME_TYPES)]
    try:
        found = messages.parse_meta(frame_type, data[1:])
    except ProtocolError:
        return
    frame = messages.build_frame(1, found, 1 if frame_type in WITH_RECORD else 0)
    assert messages.parse_meta(frame_type, frame[HEADER_BYTES:]) == found


def seeds_of_messages() -> Iterator[bytes]:
    """The greetings, from either side, and what is said about the arena."""
    engine = messages.EngineInfo("c", 7, 0, "model", "layout")
    arena = messages.ArenaInfo("/a", 1 << 20, 3, "always", "salt")
    for message in (
        messages.engine_hello(engine, []),
        messages.HelloOk(1, "s", messages.MAX_NAMES, arena),
        messages.DeclareLane(0, Lane("vllm", "model", 2, 1, "window")),
        messages.ReserveExtents((512, 1)),
        messages.Extents((messages.Extent(1, 512, 9, "Hot", b"head"), "evicted")),
        messages.Commit(((1, b"head"),)),
        messages.LoadExtents([(0, bytes(32)), (None, b"k")], 1000, 7),
        messages.Stage("ticket", ((0, bytes(64)), (1, b"")), True, 1000, 7),
        messages.Promise(True, (b"\1\0", b"")),
        messages.DoneWith((1, 2), ("ticket",)),
        messages.Describe("vllm", "model", 2, 256, bytes(32), ("", "window")),
    ):
        number = FRAME_TYPES.index(message.frame_type)
        yield bytes([number]) + messages.build_frame(1, message)[HEADER_BYTES:]


def review_any_pod(data: bytes) -> None:
    """A pod as JSON, or the texts of one, each repeated as often as its first byte says:
    whatever it is, its review ends, and soon.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        texts = [
            (text[1:] * (1 + 100 * text[0])).decode(errors="replace")
            for text in data.split(b"\0")[:12]
            if text
        ]
        image, name, value, annotation, *line = [*texts, *[""] * 4]
        document = pods.pod(
            pods.container(
                image=image,
                command=line[:4],
                args=line[4:],
                env=[{"name": f"LMCACHE_{name}", "value": value}],
            ),
            annotations={f"lmcache.io/{annotation}": value},
        )
    if isinstance(document, dict):
        with cpu_bound(MAX_REVIEW_S):
            outcome = review_pod(_injection_options(), document, "team-a")
        assert outcome.verdict == "injected" or len(outcome.operations) <= 2


def seeds_of_pods() -> Iterator[bytes]:
    """Pods of other projects' charts, and texts that are worth a second look."""
    for make in pods.SHAPES.values():
        yield json.dumps(make()).encode()
    yield b"\0".join(
        (
            b"\1vllm",
            b"\1_SERVICE_PORT",
            b"\1--kv-transfer-config",
            b"\0arena-gb",
            b"\0sh",
            b"\0-c",
            b'\0vllm serve "${a}',
        )
    )
    yield b"\0".join(
        (
            b"\1nginx@",
            b"\0CHUNK_SIZE",
            b"\0256",
            b"\0container",
            b"\0python",
            b"\0-m",
            b"\0vllm.entrypoints.cli.main",
        )
    )


FRAME_TYPES = tuple(FrameType)
TARGETS = {
    "containers": Target(read_container, seeds_of_containers),
    "blobs": Target(read_blob, seeds_of_blobs),
    "gpu-outputs": Target(read_gpu_output, seeds_of_gpu_outputs),
    "record-heads": Target(read_record_head, seeds_of_record_heads),
    "messages": Target(read_message, seeds_of_messages),
    "pods": Target(review_any_pod, seeds_of_pods),
}


@functools.cache
def _injection_options() -> InjectionOptions:
    return injection_options(WebhookSettings(sidecar_image="s:1", payload_image="p:1"))


@functools.cache
def _codec() -> CacheGenCodec:
    codec = CacheGenCodec(Profile.LOW, 1)
    codec.open()
    return codec


@functools.cache
def _readers() -> tuple[
    TorchDeserializer, SafeDeserializer, FastDeserializer, CacheGenDeserializer
]:
    cachegen = CacheGenDeserializer(LMCacheEngineConfig.from_defaults(), _METADATA, None)
    return TorchDeserializer(None), SafeDeserializer(None), FastDeserializer(None), cachegen
