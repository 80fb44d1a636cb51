"""The golden vectors: keys, records and frames, byte by byte and both ways, and all of identity
once more by code that is not ours. `test_token_databases` names chunks as they say.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import (
    PREFIX_BYTES,
    Extension,
    RecordHeader,
    TensorSpec,
    decode_head,
    decode_prefix,
    encode_head,
    payload_digest,
    verify_payload,
)
from lmcache_core.wire.frames import HEADER_BYTES, FrameType, parse_header
from lmcache_core.wire.messages import build_frame, parse_meta

from tests.contract.golden import make_vectors

GOLDEN = Path(make_vectors.__file__).parent


def vectors(file: str, part: str) -> list[Any]:
    found: list[Any] = json.loads((GOLDEN / file).read_text(encoding="utf-8"))[part]
    return found


CHAINS = vectors("identity.json", "chains")
KEYS = vectors("identity.json", "keys")
RECORDS = vectors("records.json", "records")
FRAMES = vectors("frames.json", "frames")


def named(cases: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", cases, ids=[case.get("name", "") or str(index) for index, case in enumerate(cases)]
    )


# The specification, written down a second time with hashlib and struct alone.


def spec_prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def spec_root(metadata: dict[str, Any], salt: str) -> bytes:
    layers, sides, _, heads, head_size = metadata["kv_shape"]
    layout = f"KV_BLOB/1;layers={layers};sides={sides};heads={heads};head_size={head_size};{metadata['layout']}"  # noqa: E501
    text = spec_prefixed(b"lmcache/identity/1")
    for name, value in (
        ("model", metadata["model_name"]),
        ("revision", metadata["revision"]),
        ("dtype", metadata["kv_dtype"]),
        ("layout", layout),
        ("adapter", metadata["adapter"]),
        ("salt", salt),
    ):
        text += spec_prefixed(name.encode()) + spec_prefixed(value.encode())
    return hashlib.sha256(text).digest()


def spec_chain(
    root: bytes, tokens: list[int], chunk_size: int, spans: list[tuple[bytes, int, int]]
) -> list[list[Any]]:
    chunks, previous = [], root
    for start in range(0, len(tokens), chunk_size):
        inside = tokens[start : start + chunk_size]
        end = start + len(inside)
        text = (
            b"lmcache/chunk/1\0"
            + previous
            + struct.pack("<I", len(inside))
            + b"".join(struct.pack("<I", token) for token in inside)
        )
        overlapping = sorted(
            (offset, length, content)
            for content, offset, length in spans
            if offset < end and offset + length > start
        )
        text += struct.pack("<I", len(overlapping))
        for offset, length, content in overlapping:
            text += spec_prefixed(content) + struct.pack("<qI", offset - start, length)
        previous = hashlib.sha256(text).digest()
        chunks.append([start, end, previous.hex()])
    return chunks


def spec_key(fields: list[Any]) -> bytes:
    fmt, model_name, world_size, worker_id, chunk_hash, group = fields
    texts = [str(text).encode() for text in (fmt, model_name, chunk_hash, group)]
    fmt_field, model_field, hash_field, group_field = (
        struct.pack("<H", len(text)) + text for text in texts
    )
    return (
        b"LMK1"
        + fmt_field
        + model_field
        + struct.pack("<II", world_size, worker_id)
        + hash_field
        + group_field
    )


@named(CHAINS)
def test_chains_from_the_specification(case: dict[str, Any]) -> None:
    root = spec_root(case["metadata"], case["salt"])
    assert root.hex() == case["root"]
    spans = [(bytes.fromhex(content), offset, length) for content, offset, length in case["spans"]]
    assert spec_chain(root, case["tokens"], case["chunk_size"], spans) == case["chunks"]


@named(KEYS)
def test_keys(case: dict[str, Any]) -> None:
    key = CacheEngineKey(*case["fields"])
    canonical = bytes.fromhex(case["canonical"])
    assert (key.canonical(), key.to_url(), key.to_string(), key.chunk_id().hex()) == (
        canonical,
        case["url"],
        case["text"],
        case["chunk_id"],
    )
    assert CacheEngineKey.from_canonical(canonical) == key
    assert CacheEngineKey.from_url(case["url"]) == key
    assert CacheEngineKey.from_string(case["text"]) == key


@named(KEYS)
def test_keys_from_the_specification(case: dict[str, Any]) -> None:
    canonical = spec_key(case["fields"])
    assert canonical.hex() == case["canonical"]
    assert base64.urlsafe_b64encode(canonical).decode().rstrip("=") == case["url"]
    assert hashlib.sha256(b"lmcache/chunk-id/1\0" + canonical).hexdigest()[:32] == case["chunk_id"]


@named(RECORDS)
def test_records(case: dict[str, Any]) -> None:
    payload, head = bytes.fromhex(case["payload"]), bytes.fromhex(case["head"])
    key = CacheEngineKey(*case["key"])
    header = RecordHeader(
        key.canonical(),
        case["serde"],
        case["profile"],
        case["lossy"],
        tuple(
            TensorSpec(group, dtype, tuple(shape), offset, length)
            for group, dtype, shape, offset, length in case["tensors"]
        ),
        payload_digest(payload),
        tuple(
            Extension(number, must, bytes.fromhex(data))
            for number, must, data in case["extensions"]
        ),
    )
    assert encode_head(header, len(payload)) == head
    assert decode_head(head, key) == (header, len(payload))
    prefix = decode_prefix(head[:PREFIX_BYTES])
    assert (prefix.head_bytes, prefix.payload_bytes) == (len(head), len(payload))
    verify_payload(header, payload)


@named(RECORDS)
def test_records_from_the_specification(case: dict[str, Any]) -> None:
    payload, head = bytes.fromhex(case["payload"]), bytes.fromhex(case["head"])
    extensions = [[number, must, bytes.fromhex(data)] for number, must, data in case["extensions"]]
    digest = xxhash.xxh3_128_intdigest(payload).to_bytes(16, "big")
    fields = [
        spec_key(case["key"]),
        case["serde"],
        case["profile"],
        case["lossy"],
        case["tensors"],
        digest,
        extensions,
    ]
    header = msgspec.msgpack.encode(fields)
    units = (24 + len(header) + 16 + 511) // 512
    covered = (
        b"LMKV" + struct.pack("<HHIIQ", 1, units, len(header), 0, len(payload)) + header
    ).ljust(units * 512 - 16, b"\0")
    assert covered + xxhash.xxh3_128_intdigest(covered).to_bytes(16, "big") == head


@named(FRAMES)
def test_frames(case: dict[str, Any]) -> None:
    frame, blob = bytes.fromhex(case["frame"]), bytes.fromhex(case["blob"])
    message = make_vectors.message_of(case)
    assert build_frame(case["id"], message, len(blob)) + blob == frame
    header = parse_header(frame[:HEADER_BYTES])
    assert (header.type, header.correlation_id, header.blob_bytes) == (
        message.frame_type,
        case["id"],
        len(blob),
    )
    assert (
        parse_meta(header.type, frame[HEADER_BYTES : HEADER_BYTES + header.meta_bytes]) == message
    )


@named(FRAMES)
def test_frames_from_the_specification(case: dict[str, Any]) -> None:
    numbers = (
        "Hello", "HelloOk", "Contains", "ContainsOk", "Get", "ChunkHead", "GetEnd", "Put", "PutOk",
        "Remove", "RemoveOk", "Ping", "Pong", "ErrorMessage", "HandoverChunk", "Context", "Held",
        "DeclareLane", "ReserveExtents", "Extents", "Commit", "LoadExtents", "Stage", "Promise",
        "DoneWith", "Ok", "Reject", "Describe", "Lookup", "Stats", "StatsOk", "Prefetch",
        "Watch", "Changes", "Expect", "Lend", "Lent", "GiveBack",
    )  # fmt: skip
    name, *fields = case["message"]
    blob = bytes.fromhex(case["blob"])

    meta = msgspec.msgpack.encode(make_vectors.plain(fields))
    first = struct.pack("<4sB3xQI", b"LMF1", numbers.index(name) + 1, case["id"], len(meta))
    last = struct.pack("<Q", len(blob))
    checksum = struct.pack("<I", xxhash.xxh3_64_intdigest(first + last) % (1 << 32))
    assert (first + checksum + last + meta + blob).hex() == case["frame"]


def test_there_is_a_vector_for_every_type_of_frame() -> None:
    assert {make_vectors.message_of(case).frame_type for case in FRAMES} == set(FrameType)


@pytest.mark.parametrize("name", make_vectors.VECTORS)
def test_the_script_still_makes_the_files(name: str) -> None:
    assert json.loads((GOLDEN / name).read_text(encoding="utf-8")) == make_vectors.VECTORS[name]()
