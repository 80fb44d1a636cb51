"""The documented serdes as codecs of chunks."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from lmcache_core.errors import ConfigError, SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, num_bytes
from lmcache_core.record import RecordHeader, TensorSpec, encode_head, payload_digest
from lmcache_core.serde.codec import EncodedPayload
from lmcache_core.serde.documented_codec import DOCUMENTED_SERDES, DocumentedCodec
from lmcache_core.testing.chunks import make_key, make_payload

SHAPES = [(2, 3, 7, 8), (1,), (), (0,), (3, 0, 2)]


@pytest.fixture(params=DOCUMENTED_SERDES)
def codec(request: pytest.FixtureRequest) -> DocumentedCodec:
    made = DocumentedCodec(request.param)
    made.open()
    return made


def specs_of(*tensors: tuple[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    specs, at = [], 0
    for i, (dtype, shape) in enumerate(tensors):
        specs.append(TensorSpec(f"g{i}", dtype, shape, at, num_bytes(shape, dtype)))
        at += num_bytes(shape, dtype)
    return tuple(specs)


def payload_of(specs: tuple[TensorSpec, ...]) -> bytes:
    data = bytearray(make_payload("kv", sum(spec.length for spec in specs)))
    for spec in specs:
        if spec.dtype == "bool":
            data[spec.offset : spec.offset + spec.length] = bytes(
                byte & 1 for byte in data[spec.offset : spec.offset + spec.length]
            )
    return bytes(data)


def header_of(encoded: EncodedPayload) -> RecordHeader:
    digest = payload_digest(encoded.payload)
    header = RecordHeader(
        make_key("a").key.canonical(),
        encoded.serde,
        encoded.profile,
        encoded.lossy,
        encoded.tensors,
        digest,
    )
    encode_head(header, len(encoded.payload))
    return header


def test_every_dtype_and_shape_comes_back_bit_for_bit(codec: DocumentedCodec) -> None:
    specs = specs_of(*((dtype, shape) for dtype in DTYPE_ITEMSIZE for shape in SHAPES))
    data = payload_of(specs)
    encoded = codec.encode(specs, memoryview(data))
    assert encoded is not None
    assert (encoded.serde, encoded.profile, encoded.lossy) == (codec.serde, "", False)
    assert (encoded.report.raw_bytes, encoded.report.encoded_bytes, encoded.report.groups) == (
        len(data),
        len(encoded.payload),
        (),
    )
    header = header_of(encoded)
    assert codec.decodes(header)
    out = bytearray(len(data))
    codec.decode(header, encoded.payload, memoryview(out))
    assert bytes(out) == data


def test_a_chunk_of_one_empty_tensor(codec: DocumentedCodec) -> None:
    encoded = codec.encode(specs_of(("float32", (0, 4))), memoryview(b""))
    assert encoded is not None
    assert encoded.report.bits_per_element == 0
    codec.decode(header_of(encoded), encoded.payload, memoryview(bytearray()))


@pytest.mark.parametrize("at", [0, 6, 20, 40, -1])
def test_damage_is_one_kind_of_error(codec: DocumentedCodec, at: int) -> None:
    specs = specs_of(("bfloat16", (4, 8)), ("uint8", (3,)))
    encoded = codec.encode(specs, memoryview(payload_of(specs)))
    assert encoded is not None
    damaged = bytearray(encoded.payload)
    damaged[at] ^= 1
    with pytest.raises(SerdeError):
        codec.decode(header_of(encoded), memoryview(damaged), memoryview(bytearray(67)))


@pytest.mark.parametrize("spec", [("float16", (4, 8)), ("bfloat16", (8, 4)), ("bfloat16", (32,))])
def test_a_record_that_describes_another_tensor_is_refused(
    codec: DocumentedCodec, spec: tuple[str, tuple[int, ...]]
) -> None:
    specs = specs_of(("bfloat16", (4, 8)))
    encoded = codec.encode(specs, memoryview(payload_of(specs)))
    assert encoded is not None
    other = TensorSpec("", spec[0], spec[1], 0, len(encoded.payload))
    with pytest.raises(SerdeError, match="the record says"):
        codec.decode(
            msgspec.structs.replace(header_of(encoded), tensors=(other,)),
            encoded.payload,
            memoryview(bytearray(64)),
        )


def test_room_that_is_not_the_payloads_is_refused(codec: DocumentedCodec) -> None:
    specs = specs_of(("uint8", (4,)))
    encoded = codec.encode(specs, memoryview(b"abcd"))
    assert encoded is not None
    for size in (3, 5):
        with pytest.raises(SerdeError):
            codec.decode(header_of(encoded), encoded.payload, memoryview(bytearray(size)))


def test_only_its_own_records_are_decoded() -> None:
    header = header_of(EncodedPayload(memoryview(b""), (), "torch", "", False, msgspec.UNSET))  # type: ignore[arg-type]
    assert [DocumentedCodec(serde).decodes(header) for serde in DOCUMENTED_SERDES] == [
        True,
        False,
        False,
    ]


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pickle'"):
        DocumentedCodec("pickle")


@pytest.mark.parametrize(("serde", "package"), [("fast", "torch"), ("safetensor", "safetensors")])
def test_without_its_package_it_says_what_to_install(serde: str, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from lmcache_core.serde.documented_codec import DocumentedCodec\n"
        f"codec = DocumentedCodec({serde!r})\n"
        "try: codec.open()\n"
        "except Exception as exc: print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("ConfigError")
    assert package in done.stdout
    assert "lmcache-core[torch]" in done.stdout
