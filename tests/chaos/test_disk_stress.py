"""Many callers, little room, failing operations, damaged files: what is served is right, and the
accounts balance in the end.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
from pathlib import Path

import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import MissReason
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk.layout import BLOCK_BYTES, charged_bytes

from tests.suites.backend_suite import payload_of
from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload

NUM_NAMES = 24
CAPACITY_BYTES = 10 * BLOCK_BYTES
NUM_CALLERS = 6
NUM_STEPS = 60
FAILURES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE)


class FlakyFiles(DiskFiles):
    """Fails now and then, and damages some of the files that are written."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.failing_share = 0.03
        self.damaged_share = 0.05
        self.num_failed = 0

    def fail_sometimes(self) -> None:
        if self.rng.random() < self.failing_share:
            self.num_failed += 1
            code = self.rng.choice(FAILURES)
            raise OSError(code, os.strerror(code))

    def rename(self, source: Path, target: Path) -> None:
        self.fail_sometimes()
        super().rename(source, target)
        if self.rng.random() < self.damaged_share and target.suffix == ".kvr":
            data = bytearray(target.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            target.write_bytes(data[: self.rng.choice([len(data), len(data) // 2])])


def _flaky(name):
    def operation(self, *arguments):
        self.fail_sometimes()
        return getattr(DiskFiles, name)(self, *arguments)

    return operation


for _name in ("create", "write", "sync", "sync_directory", "unlink", "read"):
    setattr(FlakyFiles, _name, _flaky(_name))


def payload_for(i: int, is_lossy: bool) -> bytes:
    return make_payload(f"{i}/{is_lossy}", 300 + 400 * i)


async def call(disk: DiskBackend, arena: ArenaAllocator, rng: random.Random) -> None:
    for _ in range(NUM_STEPS):
        picked = [rng.randrange(NUM_NAMES) for _ in range(rng.randint(1, 3))]
        action = rng.random()
        if action < 0.45:
            is_lossy = rng.random() < 0.3
            await disk.batched_put(
                [make_chunk(i, payload=payload_for(i, is_lossy), lossy=is_lossy) for i in picked]
            )
        elif action < 0.9:
            results = await disk.batched_get(
                [make_key(i) for i in picked], lambda size: arena.allocate((size,), None)
            )
            for i, result in zip(picked, results, strict=True):
                got = payload_of(result)
                assert isinstance(got, MissReason) or got in (
                    payload_for(i, True),
                    payload_for(i, False),
                )
        else:
            await disk.batched_remove([make_key(i) for i in picked])


@pytest.mark.parametrize("seed", range(2))
async def test_what_is_served_is_right_and_accounts_balance(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    files = FlakyFiles(rng)
    arena = ArenaAllocator.anonymous(1 << 20)
    # A write that the disk refuses does not keep later ones waiting.
    seconds = itertools.count(0.0)
    disk = DiskBackend(
        tmp_path, CAPACITY_BYTES, fsync=True, files=files, monotonic=lambda: next(seconds)
    )
    await disk.open()
    await asyncio.gather(
        *(call(disk, arena, random.Random(f"{seed}/{i}")) for i in range(NUM_CALLERS))
    )
    assert files.num_failed > 0
    files.failing_share = files.damaged_share = 0.0
    disk.check_integrity()
    assert disk.stats()["used_bytes"] <= CAPACITY_BYTES
    found = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert sum(charged_bytes(path.stat().st_size) for path in found) <= disk.stats()["used_bytes"]
    await disk.close()
    assert arena.used_bytes == 0

    again = DiskBackend(tmp_path, CAPACITY_BYTES)
    await again.open()
    assert set(held_keys(again)) <= set(map(make_key, range(NUM_NAMES)))
    assert again.stats()["used_bytes"] <= CAPACITY_BYTES
    await again.clear()
    for i in range(4):
        assert await again.batched_put([make_chunk(i)]) == [True]
    again.check_integrity()
    await again.close()
