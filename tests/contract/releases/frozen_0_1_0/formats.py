"""Keys and records of release 0.1.0, from docs/protocols.md. Frozen: see README.md."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import xxhash

HEAD_UNIT_BYTES = 512
CHECKSUM_BYTES = 16


def chunk_hash_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def payload_of(name: str, num_bytes: int = 1000) -> bytes:
    return hashlib.shake_256(name.encode()).digest(num_bytes)


def canonical_key(
    chunk_hash: str, fmt: str = "vllm", model: str = "test/model", world_size: int = 1, rank: int = 0, group: str = ""
) -> bytes:
    fields = [struct.pack("<H", len(text)) + text for text in (part.encode() for part in (fmt, model, chunk_hash, group))]
    return b"LMK1" + fields[0] + fields[1] + struct.pack("<II", world_size, rank) + fields[2] + fields[3]


def key_of(name: str) -> bytes:
    return canonical_key(chunk_hash_of(name))


def chunk_id_of(key: bytes) -> bytes:
    return hashlib.sha256(b"lmcache/chunk-id/1\0" + key).digest()[:16]


def head_of(key: bytes, payload: bytes) -> bytes:
    tensors = [["", "uint8", [len(payload)], 0, len(payload)]]
    header = msgspec.msgpack.encode([key, "naive", "", False, tensors, digest_of(payload), []])
    num_units = -(-(24 + len(header) + CHECKSUM_BYTES) // HEAD_UNIT_BYTES)
    covered = struct.pack("<4sHHIIQ", b"LMKV", 1, num_units, len(header), 0, len(payload)) + header
    covered = covered.ljust(num_units * HEAD_UNIT_BYTES - CHECKSUM_BYTES, b"\0")
    return covered + digest_of(covered)


def record_of(name: str) -> bytes:
    return head_of(key_of(name), payload_of(name)) + payload_of(name)


def digest_of(data: bytes) -> bytes:
    return xxhash.xxh3_128_intdigest(data).to_bytes(16, "big")


def read_head(data: bytes) -> tuple[list[Any], bytes, int]:
    """The header's fields, the whole head and the payload's length of a record, or of its head; `ValueError` where it is not one."""
    magic, version, num_units, header_bytes, reserved, payload_bytes = struct.unpack_from("<4sHHIIQ", data)
    head = data[: num_units * HEAD_UNIT_BYTES]
    if (magic, version, reserved) != (b"LMKV", 1, 0) or len(head) != num_units * HEAD_UNIT_BYTES:
        raise ValueError("not a record of version 1")
    if digest_of(head[:-CHECKSUM_BYTES]) != head[-CHECKSUM_BYTES:]:
        raise ValueError("the head's checksum is wrong")
    if any(head[24 + header_bytes : -CHECKSUM_BYTES]):
        raise ValueError("the padding is not zero")
    header = msgspec.msgpack.decode(head[24 : 24 + header_bytes])
    if len(header) != 7 or any(must_understand for number, must_understand, _ in header[6] if number not in (1, 2)):
        raise ValueError("the header is of a later release")
    return header, head, payload_bytes


def read_record(record: bytes) -> tuple[bytes, bytes]:
    """Key and payload of a whole record; `ValueError` where it is damaged."""
    header, head, payload_bytes = read_head(record)
    payload = record[len(head) :]
    if len(payload) != payload_bytes or digest_of(payload) != header[5]:
        raise ValueError("the payload is not what the header says")
    return header[0], payload
