"""Sizes that a tier, a peer or a writer only states take no memory from chunks that are held."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import (
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    TensorSpec,
    encode_head,
    payload_digest,
)
from lmcache_core.serde.blob import Head, Mode
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import ENVELOPE_SHARE, KEPT_SHARE, MIN_ENVELOPE_BYTES, LocalCPUBackend
from lmcache_core.storage.stack import TierStack

from tests.fixtures.stating_tier import Stating
from tests.suites.chunks import make_chunk, make_key

CHUNK_BYTES = 64 << 10
NUM_CHUNKS = 128
ARENA_BYTES = NUM_CHUNKS * CHUNK_BYTES
TIMEOUT_S = 20.0


def full(num_chunks: int = NUM_CHUNKS) -> LocalCPUBackend:
    hot = LocalCPUBackend(ArenaAllocator.anonymous(ARENA_BYTES), create_policy())
    for i in range(num_chunks):
        chunk = make_chunk(f"held {i}", payload=bytes(CHUNK_BYTES), allocate=hot.allocate)
        assert hot.put_many([chunk]) == [True]
        chunk.release()
    return hot


def num_held(hot: LocalCPUBackend) -> int:
    return hot.stats()["num_chunks"]


async def asked(
    hot: LocalCPUBackend, tier: StorageBackend, num_keys: int = 1, most_bytes: int | None = None
) -> list[Result]:
    stack = TierStack(hot, [tier], written=[])
    await tier.open()
    stack.lower = (tier,)
    try:
        keys = [make_key(f"wanted {i}") for i in range(num_keys)]
        return await stack.batched_get(keys, TIMEOUT_S, most_bytes=most_bytes)
    finally:
        await tier.close()
        hot.check_integrity()


@pytest.mark.parametrize("most_bytes", [None, CHUNK_BYTES])
@pytest.mark.parametrize("num_held_chunks", [NUM_CHUNKS // 2, NUM_CHUNKS])
@pytest.mark.parametrize("num_keys", [1, 8])
@pytest.mark.parametrize("share", [0.3, 0.95, 1.5])
async def test_size_without_bytes_evicts_nothing(
    share: float, num_keys: int, num_held_chunks: int, most_bytes: int | None
) -> None:
    hot = full(num_held_chunks)
    tier = Stating(int(share * ARENA_BYTES))
    for _ in range(3):
        results = await asked(hot, tier, num_keys, most_bytes)
        assert results == [Miss(MissReason.NO_MEMORY)] * num_keys
    assert num_held(hot) == num_held_chunks
    assert hot.stats()["arena_used_bytes"] == hot.stats()["used_bytes"]


@pytest.mark.parametrize("most_bytes", [None, CHUNK_BYTES])
async def test_chunk_of_the_usual_size_is_read_into_full_memory(most_bytes: int | None) -> None:
    hot = full()
    results = await asked(hot, Stating(CHUNK_BYTES, bytes(CHUNK_BYTES)), 4, most_bytes)
    assert all(isinstance(result, Chunk) for result in results)
    assert num_held(hot) == NUM_CHUNKS, "four came and four went"
    for result in results:
        assert isinstance(result, Chunk)
        result.release()


async def test_payloads_underway_leave_a_part_of_the_memory_alone() -> None:
    hot = full()
    tier = Stating(CHUNK_BYTES)
    await asked(hot, tier, 2 * NUM_CHUNKS, most_bytes=CHUNK_BYTES)
    assert tier.num_taken == NUM_CHUNKS - NUM_CHUNKS // KEPT_SHARE
    assert num_held(hot) == NUM_CHUNKS // KEPT_SHARE
    await asked(hot, tier, 2 * NUM_CHUNKS, most_bytes=CHUNK_BYTES)
    assert tier.num_taken == NUM_CHUNKS - NUM_CHUNKS // KEPT_SHARE, "what was freed counts no more"


class Encoded(Stating):
    """A tier whose small and whole records state large tensors."""

    def __init__(self, spec: TensorSpec, serde: str, profile: str, payload: bytes) -> None:
        super().__init__(len(payload))
        self.facts = (spec, serde, profile, payload)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        spec, serde, profile, payload = self.facts
        results: list[Result] = []
        for key in keys:
            header = RecordHeader(
                *(key.key.canonical(), serde, profile, serde == "cachegen"),
                *((spec,), payload_digest(payload)),
            )
            memory = allocate(len(payload))
            assert memory is not None
            memory.byte_array[:] = payload
            results.append(Chunk(key, header, encode_head(header, len(payload)), memory, self.name))
        return results


STATED_BYTES = ARENA_BYTES // 4
SHAPE = (2, 4, 256, STATED_BYTES // 4096)
BLOBS = {
    "lossless": Head(Mode.LOSSLESS, 1, 2, (STATED_BYTES // 2, 0, 1 << 16, 0)).pack(),
    "lossless of other sizes": Head(Mode.LOSSLESS, 1, 2, (300, 0, 1 << 16, 0)).pack(),
    "stored": Head(Mode.STORED, 0, 0, (0, 0, 0, 0)).pack(),
    "quantised": Head(Mode.BY_TOKEN, 0, 2, (8, 256, SHAPE[3], 0)).pack(),
    "quantised of other sizes": Head(Mode.BY_PLANE, 0, 2, (8, 256, 1, 0)).pack(),
    "no blob": bytes(24),
    "nothing": b"",
}


@pytest.fixture
async def codecs() -> AsyncIterator[Any]:
    made = create_codecs({"remote_serde": "cachegen"}, decode_documented=True)
    await made.open()
    yield made
    await made.close()


@pytest.mark.parametrize("serde", ["lossless", "cachegen", "fast", "torch", "safetensor"])
@pytest.mark.parametrize("blob", BLOBS)
async def test_small_record_that_states_large_tensors_evicts_nothing(
    blob: str, serde: str, codecs: Any
) -> None:
    if serde in ("fast", "torch", "safetensor"):
        pytest.importorskip("torch")  # LMCache's serdes are tensors
    hot = full(NUM_CHUNKS - 2)
    profile = ""
    if serde == "cachegen":
        small = TensorSpec("", "bfloat16", (2, 4, 16, 8), 0, 2048)
        profile = codecs.named("cachegen").encode((small,), memoryview(bytes(2048))).profile
        assert profile
    payload = BLOBS[blob] + bytes(512 if BLOBS[blob] else 0)
    spec = TensorSpec("", "bfloat16", SHAPE, 0, len(payload))
    tier = EncodedBackend(Encoded(spec, serde, profile, payload), codecs, "cachegen")
    for most_bytes in (None, STATED_BYTES):
        assert await asked(hot, tier, 3, most_bytes) == [Miss(MissReason.CORRUPT)] * 3
    assert num_held(hot) == NUM_CHUNKS - 2


async def test_honest_record_that_decodes_to_more_than_the_reader_can_use_evicts_nothing(
    codecs: Any,
) -> None:
    hot, raw = full(NUM_CHUNKS - 2), bytes(STATED_BYTES)
    found = codecs.named("cachegen").encode(
        (TensorSpec("", "uint8", (STATED_BYTES,), 0, STATED_BYTES),), memoryview(raw)
    )
    assert len(found.payload) < CHUNK_BYTES
    honest = Encoded(found.tensors[0], found.serde, found.profile, bytes(found.payload))
    tier = EncodedBackend(honest, codecs, "cachegen")
    for most_bytes in (None, CHUNK_BYTES):
        assert await asked(hot, tier, 3, most_bytes) == [Miss(MissReason.NO_MEMORY)] * 3
    assert num_held(hot) == NUM_CHUNKS - 2
    [result] = await asked(hot, tier, 1, STATED_BYTES)
    assert isinstance(result, Chunk)
    assert bytes(result.memory.byte_array) == raw
    result.release()


async def test_larger_chunk_than_the_reader_can_use_is_a_miss_even_if_there_is_room() -> None:
    hot = full(num_chunks=1)
    size = CHUNK_BYTES + CHUNK_BYTES // ENVELOPE_SHARE + MIN_ENVELOPE_BYTES + 1
    assert await asked(hot, Stating(size, bytes(size)), most_bytes=CHUNK_BYTES) == [
        Miss(MissReason.NO_MEMORY)
    ]
    [result] = await asked(hot, Stating(size, bytes(size)))
    assert isinstance(result, Chunk)
    result.release()
