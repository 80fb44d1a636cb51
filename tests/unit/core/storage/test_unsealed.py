"""Records as other processes find them: sealed when they leave the process, lossless before lossy,
and announced to lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import UNSEALED_DIGEST, Chunk
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.layout import charged_bytes
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.write_behind import WriteBehind

from tests.fixtures.embedded import embedded_engine
from tests.fixtures.kv import assert_equal_prefix, empty_kv
from tests.fixtures.prompts import kv_of, tokens_of
from tests.fixtures.wire import MemoryStore, serving
from tests.suites.backend_suite import Arena, payload_of
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


TIERS: dict[str, Callable[[Path], StorageBackend]] = {
    "memory": lambda root: LocalCPUBackend(ArenaAllocator.anonymous(1 << 16), create_policy()),
    "disk": lambda root: DiskBackend(root, 1 << 16),
    "file": lambda root: create_remote_backend(f"file://{root}"),
}


@pytest.mark.parametrize("tier", TIERS)
async def test_lossless_record_replaces_a_lossy_one_and_is_never_replaced(
    tmp_path: Path, tier: str
) -> None:
    backend, arena = TIERS[tier](tmp_path), Arena()
    await backend.open()
    lossless, lossy = make_payload("lossless"), make_payload("lossy", 5000)
    for payload, is_lossy, expected in (
        (lossy, True, lossy),
        (b"x", True, lossy),
        (lossless, False, lossless),
        (lossy, True, lossless),
    ):
        assert await backend.batched_put([make_chunk("a", payload=payload, lossy=is_lossy)]) == [
            True
        ]
        [result] = await backend.batched_get([make_key("a")], arena)
        assert payload_of(result) == expected
    if tier != "file":
        assert backend.stats()["used_bytes"] < len(lossy), "the lossy one is charged no more"
    await backend.close()


class Directory:
    """Applies events as lookup does."""

    def __init__(self) -> None:
        self.chunk_ids: set[bytes] = set()

    def announce_again(self) -> None: ...

    def stored(self, chunk_id: bytes, *_: object) -> None:
        self.chunk_ids.add(chunk_id)

    def removed(self, chunk_id: bytes, *_: object) -> None:
        self.chunk_ids.discard(chunk_id)


async def test_node_of_one_tenant_announces_no_chunks_of_an_earlier_tenant_of_its_disk(tmp_path):
    """Its token may not report such chunks: one of them would keep it from reporting any."""
    own, foreign = make_chunk(1), make_chunk(2, tenant="earlier")
    directory, announcer = Directory(), TierAnnouncer("default", only_own=True)
    removed = announcer.removed_from("disk")
    disk = DiskBackend(tmp_path / "chunks", 1 << 20, on_removed=removed)
    await disk.open()
    announcer.connect(directory, [disk])
    assert await disk.batched_put([own, foreign]) == [True, True]
    for chunk in (own, foreign):
        announcer.stored(chunk.key, "disk", chunk.num_bytes)
    assert directory.chunk_ids == {own.key.key.chunk_id()}
    assert [holding.chunk_id for holding in announcer.snapshot()] == [own.key.key.chunk_id()]
    directory.chunk_ids.add(foreign.key.key.chunk_id())
    removed(foreign.key)
    assert foreign.key.key.chunk_id() in directory.chunk_ids
    await disk.close()


ROOM_CHUNKS, NUM_CHUNKS = 2, 8


async def test_chunk_evicted_by_its_own_batch_is_not_announced(tmp_path):
    chunks = [make_chunk(number) for number in range(NUM_CHUNKS)]
    directory, announcer = Directory(), TierAnnouncer("default")
    disk = DiskBackend(
        tmp_path / "chunks",
        ROOM_CHUNKS * charged_bytes(chunks[0].num_bytes),
        on_removed=announcer.removed_from("disk"),
    )
    await disk.open()
    announcer.connect(directory, [disk])
    writer = WriteBehind(
        disk,
        sum(chunk.num_bytes for chunk in chunks),
        lambda chunk, tier: announcer.stored(chunk.key, tier, chunk.num_bytes),
    )
    writer.open()
    writer.offer(chunks)
    assert await writer.drain(60)
    held = {key.key.chunk_id() for key, _ in disk.held()}
    assert len(held) == ROOM_CHUNKS
    assert directory.chunk_ids == held
    await writer.close(0)
    await disk.close()
