"""With `disk_fsync` a record counts as stored only when it and its name are on the device."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

from lmcache_core.storage.disk import DiskFiles
from lmcache_core.storage.disk.backoff import MIN_PAUSE_S

from tests.fixtures.disk_tier import PATIENCE_S, Clock, Opened, file_of, fill, put
from tests.suites.chunks import make_key


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
