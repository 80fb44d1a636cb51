"""Lookup knows exactly the chunks that the tiers hold in the end."""

from __future__ import annotations

from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.layout import charged_bytes
from lmcache_core.storage.write_behind import WriteBehind

from tests.suites.chunks import make_chunk

ROOM_CHUNKS, NUM_CHUNKS = 2, 8


class Directory:
    """Applies events as lookup does."""

    def __init__(self) -> None:
        self.chunk_ids: set[bytes] = set()

    def announce_again(self) -> None: ...

    def stored(self, chunk_id: bytes, *_: object) -> None:
        self.chunk_ids.add(chunk_id)

    def removed(self, chunk_id: bytes, *_: object) -> None:
        self.chunk_ids.discard(chunk_id)


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
