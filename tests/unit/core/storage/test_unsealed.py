"""Chunks without digests: sealed when they leave the process, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import UNSEALED_DIGEST, Chunk, MissReason, Result
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.stack import TierStack

from tests.fixtures.embedded import embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import kv_of, tokens_of
from tests.fixtures.wire import MemoryStore, serving
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload

NAMES = range(5)
PATIENCE_S = 60.0
TOKENS = tokens_of((0, 1, 1), 5)


def unsealed(name: object, hot: LocalCPUBackend) -> Chunk:
    made = make_chunk(name, allocate=hot.allocate)
    return Chunk.unsealed(
        made.key,
        msgspec.structs.replace(made.header, digest=UNSEALED_DIGEST),
        made.memory,
        "memory",
    )


async def put(stack: TierStack) -> list[Chunk]:
    chunks = [unsealed(name, stack.hot) for name in NAMES]
    assert all(await stack.batched_put(chunks))
    for chunk in chunks:
        chunk.release()
    return chunks


def payloads(results: Sequence[Result]) -> list[bytes | MissReason]:
    return [payload_of(result) for result in results]


async def test_record_on_disk_is_whole(tmp_path: Path) -> None:
    arena = ArenaAllocator.anonymous(1 << 20)
    for is_written in (True, False):
        stack = TierStack(LocalCPUBackend(arena, create_policy()), [DiskBackend(tmp_path, 1 << 22)])
        await stack.open()
        if is_written:
            await put(stack)
            assert await stack.drain(PATIENCE_S)
        else:
            assert payloads(await stack.batched_get([make_key(name) for name in NAMES])) == [
                make_payload(name) for name in NAMES
            ]
        await stack.close()
    assert arena.used_bytes == 0
    records = {path.read_bytes() for path in tmp_path.rglob("*.kvr")}
    assert records == {make_chunk(name).head + make_payload(name) for name in NAMES}


async def test_two_tiers_that_write_at_the_same_time_write_the_same_record(tmp_path: Path) -> None:
    arena, store = ArenaAllocator.anonymous(1 << 20), MemoryStore()
    async with serving(store) as server:
        remote = create_remote_backend(f"lm://127.0.0.1:{server.port}", None, PATIENCE_S)
        stack = TierStack(
            LocalCPUBackend(arena, create_policy()), [DiskBackend(tmp_path, 1 << 22), remote]
        )
        await stack.open()
        await put(stack)
        assert await stack.drain(PATIENCE_S)
        heads = {chunk.head for chunk in store.chunks.values()}
        on_disk = {path.read_bytes()[: len(next(iter(heads)))] for path in tmp_path.rglob("*.kvr")}
        assert heads == on_disk == {make_chunk(name).head for name in NAMES}
        await stack.close()
    assert arena.used_bytes == 0


@pytest.mark.parametrize("writer", ["never", "sampled", "always"])
def test_records_of_an_engine_without_digests_are_valid_for_another_one(
    tmp_path: Path, writer: str
) -> None:
    with embedded_engine(tmp_path, verify_hot=writer) as first:
        first.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        hot = first.hot.get_many(held_keys(first.hot))
        if writer != "never":
            assert all(chunk is not None and chunk.is_sealed for chunk in hot)
        for chunk in hot:
            assert chunk is not None
            chunk.release()
    with embedded_engine(tmp_path, verify_hot="always") as second:
        target = empty_kv(len(TOKENS))
        assert second.engine.retrieve(TOKENS, kvcaches=target).all()
        assert_equal_prefix(target, kv_of(TOKENS), len(TOKENS))
        assert second.engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).all(), (
            "and again, checked in memory"
        )
        assert second.misses() == {}


def test_engine_without_digests_computes_none() -> None:
    with embedded_engine(verify_hot="never") as cache:
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        target = empty_kv(len(TOKENS))
        assert cache.engine.retrieve(TOKENS, kvcaches=target).all()
        assert_equal_prefix(target, kv_of(TOKENS), len(TOKENS))
        hot = [chunk for chunk in cache.hot.get_many(held_keys(cache.hot)) if chunk is not None]
        assert len(hot) == len(TOKENS) // CHUNK_SIZE + 1
        assert not any(chunk.is_sealed for chunk in hot)
        for chunk in hot:
            chunk.release()
