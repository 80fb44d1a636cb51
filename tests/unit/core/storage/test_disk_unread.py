"""An error of the environment (no descriptors, no memory, no rights, a device that hiccups)
costs hits while it lasts, and no record.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import textwrap

import pytest
from lmcache_core.record import MissReason
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.disk import DiskBackend, store
from lmcache_core.storage.disk.layout import BLOCK_BYTES

from tests.fixtures.disk_tier import TroubledFiles, fill, get, num_records, opened
from tests.suites.chunks import make_chunk, make_key, make_payload

NUM_CHUNKS = 20
ENVIRONMENT = [
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.EIO,
    errno.ETIMEDOUT,
]


@pytest.fixture
def files(monkeypatch):
    monkeypatch.setattr(store, "AGAIN_S", 0.0)
    return TroubledFiles()


def used_blocks(disk) -> int:
    disk.check_integrity()
    return disk.stats()["used_bytes"] // BLOCK_BYTES


@pytest.mark.parametrize("code", ENVIRONMENT, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["open", "read", "stat"])
async def test_a_start_that_cannot_read_its_files_leaves_them_and_looks_again(
    tmp_path, files, operation, code
):
    await fill(tmp_path, *range(NUM_CHUNKS))
    files.failing = {operation: code}
    files.only = ".kvr"
    disk = await opened(tmp_path, files=files)
    figures = disk.stats()
    assert (figures["num_chunks"], figures["damaged_at_start"], figures["quarantined_files"]) == (
        0,
        0,
        0,
    )
    assert figures["unread_files"] == NUM_CHUNKS
    assert num_records(tmp_path) == NUM_CHUNKS
    if operation != "stat":
        assert used_blocks(disk) == NUM_CHUNKS, "they take their part of the capacity"
    await disk._pool.run(disk._store.look_again)
    assert disk.stats()["unread_files"] == NUM_CHUNKS
    files.failing.clear()
    await disk._pool.run(disk._store.look_again)
    assert await get(disk, *range(NUM_CHUNKS)) == [make_payload(i) for i in range(NUM_CHUNKS)]
    assert (disk.stats()["unread_files"], used_blocks(disk)) == (0, NUM_CHUNKS)
    await disk.close()


@pytest.mark.parametrize("code", ENVIRONMENT, ids=errno.errorcode.get)
async def test_a_directory_that_cannot_be_listed_is_looked_at_again(tmp_path, files, code):
    await fill(tmp_path, *range(4), tenant="a")
    await fill(tmp_path, *range(4), tenant="b")
    files.failing = {"list_directory": code}
    files.only = "/a"
    disk = await opened(tmp_path, files=files)
    assert await get(disk, *range(4), tenant="b") == [make_payload(i) for i in range(4)]
    assert (disk.stats()["foreign_at_start"], disk.stats()["unread_files"]) == (0, 1)
    assert await disk.batched_put([make_chunk(0, tenant="a")]) == [True]
    files.failing.clear()
    await disk._pool.run(disk._store.look_again)
    assert await get(disk, *range(4), tenant="a") == [make_payload(i) for i in range(4)]
    assert used_blocks(disk) == 8
    await disk.close()


async def test_it_looks_again_by_itself(tmp_path, files, monkeypatch):
    monkeypatch.setattr("lmcache_core.storage.disk.backend.LOOK_AGAIN_S", 0.01)
    await fill(tmp_path, "a")
    files.failing = {"open": errno.EMFILE}
    disk = await opened(tmp_path, files=files)
    files.failing.clear()
    async with asyncio.timeout(60):
        while not (await disk.batched_contains([make_key("a")]))[0]:
            await asyncio.sleep(0.01)
    await disk.close()


async def test_a_root_that_cannot_be_read_behind_a_slow_start_is_read_later(
    tmp_path, files, monkeypatch
):
    """No writes meanwhile: what lies there is not counted yet."""
    await fill(tmp_path, "a")
    monkeypatch.setattr("lmcache_core.storage.disk.backend.LOAD_WAIT_S", 0.0)
    files.failing = {"list_directory": errno.EMFILE}
    files.may_list.clear()
    disk = await opened(tmp_path, files=files)
    files.may_list.set()
    await disk.wait_loaded()
    assert await disk.batched_put([make_chunk("b")]) == [False]
    files.failing.clear()
    await disk._pool.run(disk._store.look_again)
    assert await disk.batched_put([make_chunk("b")]) == [True]
    assert await get(disk, "a", "b") == [make_payload("a"), make_payload("b")]
    await disk.close()


async def test_what_could_not_be_read_is_never_removed_for_room(tmp_path, files):
    await fill(tmp_path, *range(3))
    files.failing = {"open": errno.EACCES}
    disk = await opened(tmp_path, 4 * BLOCK_BYTES, files=files)
    files.failing.clear()
    for i in range(10, 15):
        assert await disk.batched_put([make_chunk(i)]) == [True], "in the one block that is left"
    assert used_blocks(disk) == 4
    assert num_records(tmp_path) == 4
    await disk._pool.run(disk._store.look_again)
    assert await get(disk, *range(3)) == [make_payload(i) for i in range(3)]
    await disk.close()


async def test_a_disk_full_of_unread_files_is_failing_until_they_can_be_read(
    tmp_path, files, caplog
):
    await fill(tmp_path, *range(4))
    files.failing, files.only = {"open": errno.EACCES}, ".kvr"
    disk = await opened(tmp_path, 4 * BLOCK_BYTES, files=files)
    for i in range(10, 13):
        assert await disk.batched_put([make_chunk(i)]) == [False]
    figures = disk.stats()
    assert (figures["is_failing"], figures["rejected_writes"], figures["failed_writes"]) == (
        1,
        3,
        0,
    )
    assert num_records(tmp_path) == 4, "they are protected all the same"
    assert caplog.text.count("no room for writes") == 1
    files.failing = {}
    await disk._pool.run(disk._store.look_again)
    assert disk.stats()["is_failing"] == 0
    assert await disk.batched_put([make_chunk(10)]) == [True]
    await disk.close()


@pytest.mark.parametrize("how", ["by the tier", "by hand"])
async def test_removing_unread_files_ends_the_failure_that_they_are(tmp_path, files, how):
    paths = await fill(tmp_path, *range(4))
    files.failing, files.only = {"open": errno.EACCES}, ".kvr"
    disk = await opened(tmp_path, 4 * BLOCK_BYTES, files=files)
    assert await disk.batched_put([make_chunk(10)]) == [False]
    assert disk.stats()["is_failing"] == 1
    if how == "by the tier":
        assert await disk.batched_remove([make_key(0)]) == 1
    else:
        paths[0].unlink()
        await disk._pool.run(disk._store.look_again)
    assert disk.stats()["is_failing"] == 0
    assert await disk.batched_put([make_chunk(10)]) == [True]
    assert disk.stats()["is_failing"] == 0
    await disk.close()


async def test_a_write_for_which_unread_files_leave_no_room_costs_no_other_chunk(tmp_path, files):
    await fill(tmp_path, *range(3))
    files.failing = {"open": errno.EACCES}
    disk = await opened(tmp_path, 4 * BLOCK_BYTES, files=files)
    files.failing = {}
    assert await disk.batched_put([make_chunk(10)]) == [True]
    assert disk.stats()["is_failing"] == 0
    assert await disk.batched_put([make_chunk(11, payload=make_payload(11, BLOCK_BYTES))]) == [
        False
    ]
    assert disk.stats()["is_failing"] == 1
    assert await get(disk, 10) == [make_payload(10)]
    await disk.close()


async def test_a_chunk_stored_again_takes_the_place_of_its_unread_file(tmp_path, files):
    await fill(tmp_path, "a")
    files.failing = {"read": errno.ESTALE}
    disk = await opened(tmp_path, files=files)
    files.failing.clear()
    assert await disk.batched_put([make_chunk("a")]) == [True]
    assert (disk.stats()["unread_files"], used_blocks(disk)) == (0, 1)
    await disk._pool.run(disk._store.look_again)
    assert await get(disk, "a") == [make_payload("a")]
    await disk.close()


async def test_what_is_stored_during_a_look_that_fails_is_charged_once(tmp_path, files):
    paths = await fill(tmp_path, "a", "b")
    files.failing, files.only = {"open": errno.EMFILE}, ".kvr"
    disk = await opened(tmp_path, files=files)

    class StoresFirst(dict):
        def __getitem__(self, operation):
            if not disk._index.contains_many([make_key("a")])[0]:
                assert disk._store.write(make_chunk("a"))
            return super().__getitem__(operation)

    files.failing, files.only = StoresFirst(files.failing), paths["a"].name
    await disk._pool.run(disk._store.look_again)
    assert (disk.stats()["unread_files"], used_blocks(disk)) == (0, 2)
    files.failing = {}
    assert await get(disk, "a", "b") == [make_payload("a"), make_payload("b")]
    await disk.close()


@pytest.mark.parametrize("how", ["remove", "clear tenant", "clear"])
async def test_what_is_removed_while_it_cannot_be_read_does_not_come_back(tmp_path, files, how):
    await fill(tmp_path, "a")
    await fill(tmp_path, "b", tenant="other")
    files.failing = {"open": errno.EMFILE}
    disk = await opened(tmp_path, files=files)
    if how == "remove":
        assert await disk.batched_remove([make_key("a")]) == 1
    else:
        assert await disk.clear("default" if how == "clear tenant" else None) == (
            1 if how == "clear tenant" else 2
        )
    files.failing.clear()
    await disk._pool.run(disk._store.look_again)
    assert await get(disk, "a") == [MissReason.NEVER_STORED]
    assert await get(disk, "b", tenant="other") == [
        MissReason.NEVER_STORED if how == "clear" else make_payload("b")
    ]
    await disk.close()


async def test_one_hiccup_of_the_device_costs_one_miss(tmp_path, files):
    await fill(tmp_path, "a")
    disk = await opened(tmp_path, files=files)
    files.failing = {"read": errno.EIO}
    assert await get(disk, "a") == [MissReason.UNAVAILABLE]
    files.failing.clear()
    assert disk.stats()["failed_reads"] == 1
    assert disk.stats()["corrupt_chunks"] == 0
    assert await get(disk, "a") == [make_payload("a")]
    await disk.close()


async def test_a_device_that_fails_altogether_costs_no_file(tmp_path, files):
    await fill(tmp_path, *range(NUM_CHUNKS))
    disk = await opened(tmp_path, files=files)
    files.failing = {"read": errno.EIO}
    for _ in range(4):
        assert await get(disk, *range(NUM_CHUNKS)) == [MissReason.UNAVAILABLE] * NUM_CHUNKS
    files.failing.clear()
    assert await get(disk, *range(NUM_CHUNKS)) == [make_payload(i) for i in range(NUM_CHUNKS)]
    await disk.close()


async def test_a_file_that_fails_where_others_can_be_read_is_set_aside_and_looked_at_again(
    tmp_path, files
):
    paths = await fill(tmp_path, "a", "b")
    disk = await opened(tmp_path, files=files)
    files.failing, files.only = {"read": errno.EIO}, paths["a"].name
    assert await get(disk, "a", "b") == [MissReason.UNAVAILABLE, make_payload("b")]
    assert await disk.batched_contains([make_key("a")]) == [True]
    assert await get(disk, "b") == [make_payload("b")]
    assert await get(disk, "a") == [MissReason.UNAVAILABLE]
    assert await disk.batched_contains([make_key("a")]) == [False], "so that it is stored again"
    assert paths["a"].exists()
    await disk._pool.run(disk._store.look_again)
    assert await disk.batched_contains([make_key("a")]) == [False], "its payload is still not read"
    files.failing.clear()
    await disk._pool.run(disk._store.look_again)
    assert await get(disk, "a") == [make_payload("a")]
    assert used_blocks(disk) == 2
    await disk.close()


async def test_a_volume_that_is_gone_costs_no_entry(tmp_path, files):
    root = tmp_path / "disk"
    await fill(root, "a")
    disk = await opened(root, files=files)
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    assert await get(disk, "a") == [MissReason.UNAVAILABLE]
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    assert await get(disk, "a") == [make_payload("a")]
    await disk.close()


@pytest.mark.parametrize("how", ["its content", "the directory", "the directory, made again"])
async def test_a_directory_that_was_emptied_is_forgotten_and_filled_again(tmp_path, files, how):
    """The lock file goes with the records, which is no sign of a volume that is gone."""
    root = tmp_path / "disk"
    await fill(root, "a", "b")
    disk = await opened(root, files=files)
    for path in sorted(root.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    if how != "its content":
        root.rmdir()
    if how == "the directory, made again":
        root.mkdir()
    assert await get(disk, "a", "b") == [MissReason.NEVER_STORED] * 2
    assert await disk.batched_contains([make_key("a"), make_key("b")]) == [False, False]
    assert await disk.batched_put([make_chunk("a")]) == [True]
    assert await get(disk, "a") == [make_payload("a")]
    assert (num_records(root), used_blocks(disk)) == (1, 1)
    (path,) = root.rglob("*.kvr")
    path.unlink()
    assert await get(disk, "a") == [MissReason.NEVER_STORED], "files that vanish later, too"
    await disk.close()


async def test_a_look_while_the_volume_is_gone_forgets_nothing(tmp_path, files):
    root = tmp_path / "disk"
    await fill(root, "a")
    files.failing, files.only = {"open": errno.EMFILE}, ".kvr"
    disk = await opened(root, files=files)
    files.failing = {}
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    await disk._pool.run(disk._store.look_again)
    assert disk.stats()["unread_files"] == 1
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    await disk._pool.run(disk._store.look_again)
    assert await get(disk, "a") == [make_payload("a")]
    await disk.close()


class Announced:
    """How many chunks each full announcement told of."""

    def __init__(self, disk: DiskBackend) -> None:
        self.counts: list[int] = []
        self.announcer = TierAnnouncer("default")
        self.announcer.connect(self, [disk])

    def announce_again(self) -> None:
        self.counts.append(len(list(self.announcer.snapshot())))

    def removed(self, *_: object) -> None: ...


@pytest.mark.parametrize("operation", ["open", "list_directory"])
async def test_what_can_be_read_later_is_announced(tmp_path, files, monkeypatch, operation):
    """`list` fails for the root, which is then read as a whole later."""
    monkeypatch.setattr("lmcache_core.storage.disk.backend.LOOK_AGAIN_S", 0.01)
    await fill(tmp_path, *range(NUM_CHUNKS))
    monkeypatch.setattr("lmcache_core.storage.disk.backend.LOAD_WAIT_S", 0.0)
    files.failing = {operation: errno.EMFILE}
    files.may_list.clear()
    disk = await opened(tmp_path, files=files)
    announced = Announced(disk)
    announcing = asyncio.ensure_future(announced.announcer.announce_when_loaded(disk))
    files.may_list.set()
    await announcing
    await asyncio.sleep(0.1)
    assert announced.counts == [0], "looks that find nothing announce nothing"
    files.failing = {}
    async with asyncio.timeout(60):
        while not announced.counts[-1]:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert announced.counts == [0, NUM_CHUNKS]
    await disk.close()


async def test_a_chunk_that_was_set_aside_is_announced_when_it_is_back(
    tmp_path, files, monkeypatch
):
    monkeypatch.setattr("lmcache_core.storage.disk.backend.LOOK_AGAIN_S", 0.01)
    paths = await fill(tmp_path, "a", "b")
    disk = await opened(tmp_path, files=files)
    announced = Announced(disk)
    await announced.announcer.announce_when_loaded(disk)
    files.failing, files.only = {"read": errno.EIO}, paths["a"].name
    assert await get(disk, "a", "b") == [MissReason.UNAVAILABLE, make_payload("b")]
    assert await get(disk, "b") == [make_payload("b")]
    assert await get(disk, "a") == [MissReason.UNAVAILABLE]
    assert await disk.batched_contains([make_key("a")]) == [False]
    files.failing = {}
    async with asyncio.timeout(60):
        while len(announced.counts) < 2:
            await asyncio.sleep(0.01)
    assert announced.counts == [2, 2]
    await disk.close()


CHILD = """
    import asyncio, os, resource, sys
    from pathlib import Path
    from lmcache_core.storage.disk import DiskFiles, DiskBackend
    from tests.suites.chunks import make_chunk

    class Tight(DiskFiles):
        '''Leaves no descriptor free but, to list a directory, one.'''

        held = []

        def list_directory(self, path):
            if self.held:
                os.close(self.held.pop())
            names = super().list_directory(path)
            try:
                while True:
                    self.held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                return names

    async def main(root):
        disk = DiskBackend(root, 1 << 20)
        await disk.open()
        assert all(await disk.batched_put([make_chunk(i) for i in range(20)]))
        await disk.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        tight = Tight()
        disk = DiskBackend(root, 1 << 20, files=tight)
        await disk.open()
        print("without descriptors:", disk.stats()["num_chunks"])
        for fd in tight.held:
            os.close(fd)
        await disk.close()
        disk = DiskBackend(root, 1 << 20)
        await disk.open()
        print("with descriptors:", disk.stats()["num_chunks"])
        await disk.close()

    asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_start_without_descriptors_costs_no_record(tmp_path):
    """The kernel's own EMFILE."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["without descriptors: 0", "with descriptors: 20"]
