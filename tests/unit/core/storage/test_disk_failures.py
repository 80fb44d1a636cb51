"""A disk that is full, read-only or broken costs hits and nothing else, and is found healed. With
`disk_fsync` a record counts as stored only when it and its name are on the device.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import threading
from pathlib import Path

import pytest
from lmcache_core.record import MissReason
from lmcache_core.storage.disk import DiskFiles
from lmcache_core.storage.disk.backoff import MAX_PAUSE_S, MIN_PAUSE_S, SETTLED_S, WriteBackoff
from lmcache_core.storage.disk.layout import BLOCK_BYTES

from tests.fixtures.disk_tier import PATIENCE_S, Clock, Opened, file_of, fill, get, put
from tests.suites.chunks import make_chunk, make_key, make_payload

NUM_SLOTS = 3


@pytest.fixture
async def disk(opened, tmp_path, files, clock):
    backend = await opened(tmp_path, NUM_SLOTS * BLOCK_BYTES, files, fsync=True, monotonic=clock)
    yield backend
    files.failing.clear()
    await backend.close()
    num_files = sum(1 for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock")
    assert num_files * BLOCK_BYTES == backend.stats()["used_bytes"]


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
async def test_failed_write_leaves_nothing_and_heals(disk, files, clock, tmp_path, operation, code):
    assert await disk.batched_put([make_chunk("before")]) == [True]
    files.failing = {operation: code}
    assert await disk.batched_put([make_chunk("a")]) == [False]
    assert list((tmp_path / ".tmp").iterdir()) == []
    assert await get(disk, "before", "a") == [make_payload("before"), MissReason.NEVER_STORED]
    files.failing.clear()
    assert await disk.batched_put([make_chunk("a")]) == [False], "it is left alone for a while"
    figures = disk.stats()
    assert (figures["failed_writes"], figures["rejected_writes"], figures["is_failing"]) == (
        1,
        1,
        1,
    )
    clock.now += MIN_PAUSE_S
    assert await disk.batched_put([make_chunk("a")]) == [True]
    assert await get(disk, "a") == [make_payload("a")]
    assert disk.stats()["is_failing"] == 0


async def test_full_disk_is_logged_once_and_so_is_its_recovery(
    disk, files, clock, caplog, tmp_path
):
    caplog.set_level("INFO")
    for i in range(20):  # now and then space is freed and one write succeeds
        files.failing = {} if i % 3 == 2 else {"write": errno.ENOSPC}
        await disk.batched_put([make_chunk(f"{i}-{j}") for j in range(4)])
        clock.now += MAX_PAUSE_S if i == 10 else 1.0
    path = f"path={tmp_path}"
    refused = f"disk refuses writes, retrying later: {path} error='No space left on device'"
    assert caplog.messages == [refused, f"disk takes writes again: {path}", refused]
    files.failing.clear()
    for seconds in (MIN_PAUSE_S, 1.0, SETTLED_S, 1.0):
        clock.now += seconds
        assert await disk.batched_put([make_chunk(clock.now)]) == [True]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2


async def test_file_that_cannot_be_removed_does_not_stop_eviction(disk, files, clock, tmp_path):
    for name in range(NUM_SLOTS):
        assert await disk.batched_put([make_chunk(name)]) == [True]
    files.failing, files.only = {"unlink": errno.EPERM}, file_of(tmp_path, 0).name
    kept = []
    for name in range(10, 14):
        kept += await disk.batched_put([make_chunk(name)])
        clock.now += MAX_PAUSE_S
    assert kept == [False, True, True, True]
    assert await get(disk, 0) == [make_payload(0)]


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EISDIR, MissReason.CORRUPT), (errno.EIO, MissReason.UNAVAILABLE)]
)
async def test_read_error_drops_a_chunk_only_if_it_is_no_file(disk, files, code, reason):
    await disk.batched_put([make_chunk("a")])
    files.failing = {"read": code}
    assert await get(disk, "a") == [reason]
    assert await disk.batched_contains([make_key("a")]) == [code == errno.EIO]


async def test_removed_chunk_whose_file_stayed_can_be_stored_again(disk, files):
    assert await disk.batched_put([make_chunk("a")]) == [True]
    files.failing = {"unlink": errno.EIO}
    assert await disk.batched_remove([make_key("a")]) == 1
    files.failing.clear()
    assert await disk.batched_put([make_chunk("a")]) == [True]
    for i in range(NUM_SLOTS - 1):
        assert await disk.batched_put([make_chunk(i)]) == [True]
    assert await get(disk, "a") == [make_payload("a")], "its file is not taken for the old one"


async def test_clearing_counts_a_chunk_whose_file_stayed_once(disk, files):
    assert await disk.batched_put([make_chunk(i) for i in range(3)]) == [True] * 3
    files.failing = {"unlink": errno.EIO}
    assert await disk.clear() == 3
    assert await disk.clear() == 3, "the files are still there"


async def test_real_limit_on_file_sizes_is_a_refused_write(disk, clock):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        assert await disk.batched_put([make_chunk("a")]) == [False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    clock.now += MIN_PAUSE_S
    assert await disk.batched_put([make_chunk("a")]) == [True]


def test_pauses_double_up_to_a_bound_and_late_failures_do_not_count():
    clock = Clock()
    backoff = WriteBackoff(clock)
    assert backoff.allows()
    backoff.failed()
    backoff.failed()
    pause_s = MIN_PAUSE_S
    for _ in range(10):
        clock.now += pause_s - 0.01
        assert not backoff.allows()
        clock.now += 0.02
        assert backoff.allows(), "one probe"
        assert not backoff.allows(), "and only one"
        backoff.failed()
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
    backoff.succeeded()
    assert backoff.allows()
    assert backoff.allows()


class RecordedSyncs(DiskFiles):
    """Records renames and what was synced; `failing` directories are not."""

    def __init__(self) -> None:
        self.calls: list[str | Path] = []
        self.failing: set[Path] = set()

    def sync(self, fd: int) -> None:
        self.calls.append("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.calls.append("rename")

    def sync_directory(self, path: Path) -> None:
        if path in self.failing:
            raise OSError(errno.EIO, "injected")
        self.calls.append(path)
        super().sync_directory(path)


async def test_record_is_synced_before_its_name_and_the_name_after_it(
    opened: Opened, tmp_path: Path
) -> None:
    files, root = RecordedSyncs(), tmp_path / "new" / "root"
    disk = await opened(root, files=files, fsync=True)
    await put(disk, "a")
    shard = file_of(root, "a").parent
    assert files.calls[:3] == ["sync", "rename", shard]
    above = [*shard.parents[:3], tmp_path]
    assert files.calls[3 : 3 + len(above)] == above, "the names of new directories count too"
    files.calls.clear()
    await disk.batched_remove([make_key("a")])
    await put(disk, "a")
    assert files.calls == ["sync", "rename", shard]


async def test_name_that_could_not_be_synced_is_synced_by_the_next_write(
    opened: Opened, clock: Clock, tmp_path: Path
) -> None:
    files = RecordedSyncs()
    disk = await opened(tmp_path, files=files, fsync=True, monotonic=clock)
    tenant = file_of(tmp_path, "a").parent.parent
    files.failing = {tenant}
    await put(disk, "a", is_kept=False)
    files.failing = set()
    files.calls.clear()
    await disk.batched_remove([make_key("a")])
    clock.now += MIN_PAUSE_S
    await put(disk, "a")
    assert tenant in files.calls


async def test_record_of_an_earlier_process_is_synced_when_it_is_stored_again(
    opened: Opened, tmp_path: Path
) -> None:
    shard = (await fill(tmp_path, "a"))["a"].parent
    files = RecordedSyncs()
    disk = await opened(tmp_path, files=files, fsync=True)
    await put(disk, "a")
    assert files.calls[:2] == ["sync", shard]
    files.calls.clear()
    files.failing = {shard}
    await put(disk, "a")
    assert files.calls == []


async def test_store_of_a_record_whose_name_is_not_synced_yet_syncs_it_itself(
    opened: Opened, tmp_path: Path
) -> None:
    class FirstSyncHangs(RecordedSyncs):
        def __init__(self) -> None:
            super().__init__()
            self.hangs, self.may_continue = threading.Event(), threading.Event()

        def sync_directory(self, path: Path) -> None:
            if path == shard and not self.hangs.is_set():
                self.hangs.set()
                assert self.may_continue.wait(PATIENCE_S)
            super().sync_directory(path)

    files, shard = FirstSyncHangs(), file_of(tmp_path, "a").parent
    disk = await opened(tmp_path, files=files, fsync=True)
    first = asyncio.create_task(put(disk, "a"))
    assert await asyncio.to_thread(files.hangs.wait, PATIENCE_S)
    await put(disk, "a")
    assert shard in files.calls, "reported as stored before its name was on the device"
    files.may_continue.set()
    await first
    files.calls.clear()
    await put(disk, "a")
    assert not files.calls, "a synced name costs nothing more"
