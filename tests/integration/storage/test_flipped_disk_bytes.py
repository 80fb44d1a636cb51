"""Every byte of a record on disk, flipped in turn, gives a miss and never bytes."""

from __future__ import annotations

import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import MissReason
from lmcache_core.record.codec import HEAD_ALIGN_BYTES
from lmcache_core.storage.disk import DiskBackend

from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

SMALL_PAYLOAD_BYTES = 7000
LARGE_PAYLOAD_BYTES = 32 << 20


class Flipper:
    """Damages one byte of the one record in a directory, and mends it."""

    def __init__(self, root) -> None:
        [self._path] = root.rglob("*.kvr")
        self.num_bytes = self._path.stat().st_size

    def flip(self, at: int, mask: int) -> None:
        with self._path.open("r+b") as file:
            file.seek(at)
            [byte] = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ mask]))

    def find_again(self, at: int) -> None:
        """Put the record back that its own digest has condemned; one that is read as no record,
        or as one of another version, was left.
        """
        if at < HEAD_ALIGN_BYTES:
            assert self._path.exists()
        else:
            [bad] = self._path.parents[2].joinpath(".bad").iterdir()
            bad.rename(self._path)


async def stored(root, num_bytes: int) -> None:
    disk = DiskBackend(root, 2 * LARGE_PAYLOAD_BYTES)
    await disk.open()
    assert await disk.batched_put([make_chunk("a", payload=make_payload("a", num_bytes))]) == [True]
    await disk.close()


async def read_once(disk: DiskBackend, arena: ArenaAllocator) -> bytes | MissReason:
    [result] = await disk.batched_get([make_key("a")], lambda size: arena.allocate((size,), None))
    return payload_of(result)


@pytest.mark.parametrize("mask", [0x01, 0xFF])
async def test_every_byte_of_a_small_record_while_it_is_open(tmp_path, mask):
    await stored(tmp_path, SMALL_PAYLOAD_BYTES)
    flipper = Flipper(tmp_path)
    assert flipper.num_bytes <= 8192
    arena = ArenaAllocator.anonymous(8192)
    disk = DiskBackend(tmp_path, LARGE_PAYLOAD_BYTES)
    await disk.open()
    for at in range(flipper.num_bytes):
        flipper.flip(at, mask)
        assert await read_once(disk, arena) is MissReason.CORRUPT, f"byte {at}"
        assert await read_once(disk, arena) is MissReason.NEVER_STORED, f"byte {at}: not forgotten"
        assert await disk.batched_put(
            [make_chunk("a", payload=make_payload("a", SMALL_PAYLOAD_BYTES))]
        ) == [True]
    assert await read_once(disk, arena) == make_payload("a", SMALL_PAYLOAD_BYTES)
    assert disk.stats()["corrupt_chunks"] == flipper.num_bytes
    disk.check_integrity()
    await disk.close()
    assert arena.used_bytes == 0


async def test_every_byte_of_a_head_before_a_start(tmp_path):
    await stored(tmp_path, 100)
    flipper = Flipper(tmp_path)
    arena = ArenaAllocator.anonymous(4096)
    for at in range(flipper.num_bytes):
        flipper.flip(at, 0x10)
        disk = DiskBackend(tmp_path, LARGE_PAYLOAD_BYTES)
        await disk.open()
        await disk.wait_loaded()
        assert isinstance(await read_once(disk, arena), MissReason), f"byte {at}"
        await disk.close()
        flipper.find_again(at)
        flipper.flip(at, 0x10)
