"""Makes chunks: small, valid, and determined by their arguments."""

from __future__ import annotations

import hashlib
import random

from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey, Lane
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import (
    Allocate,
    Chunk,
    RecordHeader,
    TensorSpec,
    encode_head,
    payload_digest,
)
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.hot import LocalCPUBackend

DEFAULT_PAYLOAD_BYTES = 1000


def make_key(name: object, tenant: str = DEFAULT_TENANT) -> ChunkKey:
    """The key of the chunk called `name`."""
    chunk_hash = hashlib.sha256(str(name).encode()).hexdigest()
    return ChunkKey.of(tenant, CacheEngineKey("vllm", "test/model", 1, 0, chunk_hash))


def held_keys(tier: LocalCPUBackend | DiskBackend) -> list[ChunkKey]:
    """The names of all chunks that a tier would serve now."""
    return [key for key, _ in tier.held()]


def make_payload(name: object, num_bytes: int = DEFAULT_PAYLOAD_BYTES) -> bytes:
    """The payload of the chunk called `name`: pseudo-random, the same every time."""
    return random.Random(f"{name}/{num_bytes}").randbytes(num_bytes)


def make_chunk(
    name: object,
    tenant: str = DEFAULT_TENANT,
    payload: bytes | None = None,
    lossy: bool = False,
    allocate: Allocate | None = None,
    lane: Lane | None = None,
) -> Chunk:
    """A whole and valid chunk; the caller owns it.

    Args:
        name: Determines key and payload.
        tenant: Its namespace.
        payload: Its bytes, instead of `make_payload(name)`.
        lossy: Mark it as coming from a lossy encoding.
        allocate: Where its memory comes from, instead of plain Python bytes.
        lane: Instead of that of all others.
    """
    key = make_key(name, tenant)
    if lane is not None:
        key = ChunkKey(tenant, lane, key.packed_hash)
    data = make_payload(name) if payload is None else payload
    spec = TensorSpec("", "uint8", (len(data),), 0, len(data))
    serde = "cachegen" if lossy else "naive"
    header = RecordHeader(key.key.canonical(), serde, "", lossy, (spec,), payload_digest(data))
    memory: MemoryObj = BytesBufferMemoryObj(data)
    if allocate is not None:
        taken = allocate(len(data))
        assert taken is not None, "no room for the test's own chunk"
        taken.byte_array[:] = data
        memory = taken
    return Chunk(key, header, encode_head(header, len(data)), memory, "test")


def overstated(name: object) -> Chunk:
    """A whole record of some hundred bytes that states tensors of 30 MiB, encoded without loss."""
    data = bytes(200)
    key = make_key(name)
    spec = TensorSpec("", "bfloat16", (2, 30, 256, 1024), 0, len(data))
    header = RecordHeader(key.key.canonical(), "lossless", "", False, (spec,), payload_digest(data))
    memory = BytesBufferMemoryObj(data)
    return Chunk(key, header, encode_head(header, len(data)), memory, "test")


def make_record(name: object, payload: bytes | None = None) -> bytes:
    """The record of that chunk, as it lies in a file or goes over a socket."""
    chunk = make_chunk(name, payload=payload)
    return chunk.head + bytes(chunk.memory.byte_array)
