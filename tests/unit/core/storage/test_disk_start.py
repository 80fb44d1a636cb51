"""What the disk tier does with the directory that it finds at its start, and with files that it
cannot read, then or later: an error of the environment (no descriptors, no memory, no permission, a
transient device error) costs hits while it lasts, and no record.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import MissReason
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.disk import DiskBackend, DiskFiles, backend, store
from lmcache_core.storage.disk.layout import BLOCK_BYTES

from tests.fixtures.disk_tier import (
    PATIENCE_S,
    TroubledFiles,
    fill,
    get,
    look_again,
    num_records,
    put,
)
from tests.fixtures.waiting import until
from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload


async def test_smaller_capacity_evicts_the_oldest_records(opened, tmp_path):
    paths = await fill(tmp_path, *range(6))
    for age, name in enumerate([3, 1, 4, 0, 5, 2]):
        os.utime(paths[name], (1_000_000_000 - age, 1_000_000_000 - age))
    disk = await opened(tmp_path, 2 * BLOCK_BYTES)
    assert set(held_keys(disk)) == {make_key(3), make_key(1)}
    assert num_records(tmp_path) == 2


class DyingFiles(DiskFiles):
    """Keeps the directory as it is before each change and in the middle of each write: what a
    process leaves that is killed there.
    """

    def __init__(self, root, copies):
        self._root, self._copies = root, copies
        self.num_copies = 0

    def _keep(self):
        shutil.copytree(self._root, self._copies / str(self.num_copies))
        self.num_copies += 1

    def create(self, path):
        self._keep()
        return super().create(path)

    def write(self, fd, buffers):
        for part in buffers:
            self._keep()
            data = memoryview(part).cast("B")
            super().write(fd, [data[: len(data) // 2]])
            self._keep()
            super().write(fd, [data[len(data) // 2 :]])

    def rename(self, source, target):
        self._keep()
        super().rename(source, target)

    def unlink(self, path):
        self._keep()
        super().unlink(path)


async def test_a_process_killed_at_any_point_leaves_whole_records_and_no_damaged_one(
    opened, tmp_path
):
    root, copies = tmp_path / "disk", tmp_path / "copies"
    await fill(root, 0)
    files = DyingFiles(root, copies)
    disk = await opened(root, files=files)
    await disk.batched_put([make_chunk(1)])
    await disk.batched_remove([make_key(0)])
    await disk.close()
    assert files.num_copies > 6
    for number in range(files.num_copies):
        left = await opened(copies / str(number))
        assert [one for one in await get(left, 0, 1) if isinstance(one, MissReason)] in (
            [MissReason.NEVER_STORED],
            [],
        )
        assert left.stats()["corrupt_chunks"] == 0
        assert num_records(copies / str(number)) == len(held_keys(left))
        await left.close()


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def under_another_name(path):
    path.rename(path.with_name(path.name[:2] + "0" * 62 + ".kvr"))


def a_directory(path):
    path.unlink()
    path.mkdir()


def a_link(path):
    elsewhere = path.parents[3] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


of_a_later_version = rewritten(lambda data: data[:4] + b"\2" + data[5:])
DAMAGES = {
    "short": rewritten(lambda data: data[:-1]),
    "long": rewritten(lambda data: data + b"x"),
    "empty": rewritten(lambda data: b""),
    "damaged head": rewritten(lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:]),
    "under another name": under_another_name,
    "a directory": a_directory,
    "a link": a_link,
    "a pipe": a_pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_file_that_is_no_record_is_set_aside_and_never_served(opened, tmp_path, damage):
    root = tmp_path / "root"
    paths = await fill(root, "a", "b")
    DAMAGES[damage](paths["a"])
    disk = await opened(root)
    assert held_keys(disk) == [make_key("b")]
    assert await get(disk, "a", "b") == [MissReason.NEVER_STORED, make_payload("b")]
    assert disk.stats()["damaged_at_start"] == 1
    assert await disk.batched_put([make_chunk("a")]) == [True]
    assert await get(disk, "a") == [make_payload("a")]


async def test_record_of_a_later_version_stays_until_its_space_is_needed(opened, tmp_path):
    """After a rollback: the newer version may be back tomorrow."""
    paths = await fill(tmp_path, *range(12))
    for path in paths.values():
        of_a_later_version(path)
    disk = await opened(tmp_path, 14 * BLOCK_BYTES)
    figures = disk.stats()
    names = ("num_chunks", "damaged_at_start", "quarantined_files")
    assert [figures[name] for name in names] == [0, 0, 0]
    assert figures["used_bytes"] == 12 * BLOCK_BYTES
    assert await get(disk, *range(12)) == [MissReason.NEVER_STORED] * 12
    for name in ("x", "y"):
        assert await disk.batched_put([make_chunk(name)]) == [True]
    assert all(path.exists() for path in paths.values())
    assert await disk.batched_put([make_chunk("z"), make_chunk(0)]) == [True, True]
    assert await get(disk, "x", "y", "z", 0) == [make_payload(name) for name in ("x", "y", "z", 0)]
    assert sum(path.exists() for path in paths.values()) in (10, 11), (
        "one is replaced, others make room"
    )


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", "ü".encode() * 100, b"%zz"], ids=["no UTF-8", "too long", "no escape"]
)
async def test_directory_that_no_tenant_can_have_is_skipped(opened, tmp_path, name):
    await fill(tmp_path, "a")
    (tmp_path / os.fsdecode(name)).mkdir()
    disk = await opened(tmp_path)
    assert disk.stats()["foreign_at_start"] == 1
    assert await disk.clear() == 1


async def test_half_written_files_are_removed_and_foreign_files_stay(opened, tmp_path):
    await fill(tmp_path, "a")
    (tmp_path / ".tmp" / "1234-0.tmp").write_bytes(b"half")
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "default" / "notes.txt",
        tmp_path / "default" / "ab" / "notes.kvr",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    disk = await opened(tmp_path)
    figures = disk.stats()
    names = ("leftovers_at_start", "foreign_at_start", "num_chunks")
    assert [figures[name] for name in names] == [1, 3, 1]
    assert list((tmp_path / ".tmp").iterdir()) == []
    await disk.clear()
    assert all(path.read_bytes() == b"mine" for path in foreign)


@pytest.mark.parametrize("has_size", [True, False], ids=["size known", "size unreadable"])
async def test_damaged_files_of_earlier_processes_are_charged_and_bounded(
    opened, tmp_path, has_size
):
    (tmp_path / ".bad").mkdir()
    for i in range(12):
        (tmp_path / ".bad" / f"{i}.bad").write_bytes(b"x" * 5000)
    files = TroubledFiles({} if has_size else {"stat": errno.EIO})
    files.only = ".bad/"
    disk = await opened(tmp_path, files=files)
    assert len(list((tmp_path / ".bad").iterdir())) == 8
    assert disk.stats()["quarantined_files"] == 8
    if has_size:
        assert disk.stats()["used_bytes"] == 8 * 2 * BLOCK_BYTES


async def test_large_directory_is_read_in_the_background(opened, tmp_path, monkeypatch):
    await fill(tmp_path, "a")
    monkeypatch.setattr(backend, "LOAD_WAIT_S", 0.0)
    files = TroubledFiles()
    files.may_list.clear()
    disk = await opened(tmp_path, files=files)
    assert disk.stats()["is_loading"] == 1
    assert await get(disk, "a") == [MissReason.NEVER_STORED]
    assert await disk.batched_put([make_chunk("b")]) == [False]
    clearing = asyncio.ensure_future(disk.clear("other tenant"))
    await asyncio.sleep(0)
    assert not clearing.done()
    files.may_list.set()
    assert await clearing == 0
    assert disk.stats()["is_loading"] == 0
    assert await get(disk, "a") == [make_payload("a")]
    assert await disk.batched_put([make_chunk("b")]) == [True]


async def test_nothing_counts_as_removed_while_the_directory_cannot_be_read(
    opened, tmp_path, monkeypatch
):
    """It would come back as soon as the directory can be read."""
    await fill(tmp_path, "a")
    monkeypatch.setattr(backend, "LOAD_WAIT_S", 0.0)
    files = TroubledFiles({"list_directory": errno.EMFILE})
    files.may_list.clear()
    disk = await opened(tmp_path, files=files)
    files.may_list.set()
    await disk.wait_loaded()
    assert await disk.batched_put([make_chunk("b")]) == [False], "its records are not charged yet"
    with pytest.raises(UnavailableError, match="cannot be read"):
        await disk.clear()
    with pytest.raises(UnavailableError, match="cannot be read"):
        await disk.batched_remove([make_key("a")])
    files.failing.clear()
    await look_again(disk)
    assert await disk.clear() == 1


async def test_whole_records_are_served_again_for_their_tenant(opened, tmp_path):
    await fill(tmp_path, "a", "b", tenant="tenant ü/..")
    disk = await opened(tmp_path)
    assert await get(disk, "a", "b", tenant="tenant ü/..") == [make_payload("a"), make_payload("b")]
    assert await get(disk, "a") == [MissReason.NEVER_STORED]
    assert disk.stats()["used_bytes"] == 2 * BLOCK_BYTES


NUM_CHUNKS = 20
ENVIRONMENT = [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE, errno.EIO]


@pytest.fixture
def files(monkeypatch):
    monkeypatch.setattr(store, "AGAIN_S", 0.0)
    return TroubledFiles()


def used_blocks(disk) -> int:
    disk.check_integrity()
    return disk.stats()["used_bytes"] // BLOCK_BYTES


@pytest.mark.parametrize("code", ENVIRONMENT, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["open", "read", "stat"])
async def test_files_that_cannot_be_read_at_the_start_stay_and_are_read_later(
    opened, tmp_path, files, operation, code
):
    await fill(tmp_path, *range(NUM_CHUNKS))
    files.failing = {operation: code}
    files.only = ".kvr"
    disk = await opened(tmp_path, files=files)
    figures = disk.stats()
    names = ("num_chunks", "damaged_at_start", "quarantined_files")
    assert [figures[name] for name in names] == [0, 0, 0]
    assert figures["unread_files"] == NUM_CHUNKS
    assert num_records(tmp_path) == NUM_CHUNKS
    if operation != "stat":
        assert used_blocks(disk) == NUM_CHUNKS, "they take their part of the capacity"
    await look_again(disk)
    assert disk.stats()["unread_files"] == NUM_CHUNKS
    files.failing.clear()
    await look_again(disk)
    assert await get(disk, *range(NUM_CHUNKS)) == [make_payload(i) for i in range(NUM_CHUNKS)]
    assert (disk.stats()["unread_files"], used_blocks(disk)) == (0, NUM_CHUNKS)


@pytest.mark.parametrize("code", ENVIRONMENT, ids=errno.errorcode.get)
async def test_directory_that_cannot_be_listed_is_read_later(opened, tmp_path, files, code):
    await fill(tmp_path, *range(4), tenant="a")
    await fill(tmp_path, *range(4), tenant="b")
    files.failing = {"list_directory": code}
    files.only = "/a"
    disk = await opened(tmp_path, files=files)
    assert await get(disk, *range(4), tenant="b") == [make_payload(i) for i in range(4)]
    assert (disk.stats()["foreign_at_start"], disk.stats()["unread_files"]) == (0, 1)
    assert await disk.batched_put([make_chunk(0, tenant="a")]) == [True]
    files.failing.clear()
    await look_again(disk)
    assert await get(disk, *range(4), tenant="a") == [make_payload(i) for i in range(4)]
    assert used_blocks(disk) == 8


async def test_unread_files_are_never_removed_for_room(opened, tmp_path, files):
    await fill(tmp_path, *range(3))
    files.failing = {"open": errno.EACCES}
    disk = await opened(tmp_path, 4 * BLOCK_BYTES, files=files)
    files.failing.clear()
    for i in range(10, 15):
        assert await disk.batched_put([make_chunk(i)]) == [True], "in the one block that is left"
    assert used_blocks(disk) == 4
    assert num_records(tmp_path) == 4
    await look_again(disk)
    assert await get(disk, *range(3)) == [make_payload(i) for i in range(3)]


@pytest.mark.parametrize("how", ["read again", "removed by the tier", "removed by hand"])
async def test_disk_full_of_unread_files_is_failing_until_they_are_read_or_removed(
    opened, tmp_path, files, caplog, how
):
    paths = await fill(tmp_path, *range(4))
    files.failing, files.only = {"open": errno.EACCES}, ".kvr"
    disk = await opened(tmp_path, 4 * BLOCK_BYTES, files=files)
    for i in range(10, 13):
        assert await disk.batched_put([make_chunk(i)]) == [False]
    figures = disk.stats()
    names = ("is_failing", "rejected_writes", "failed_writes")
    assert [figures[name] for name in names] == [1, 3, 0]
    assert num_records(tmp_path) == 4, "they are protected all the same"
    assert caplog.text.count("no room for writes") == 1
    if how == "read again":
        files.failing = {}
    elif how == "removed by the tier":
        assert await disk.batched_remove([make_key(0)]) == 1
    else:
        paths[0].unlink()
    await look_again(disk)
    assert disk.stats()["is_failing"] == 0
    assert await disk.batched_put([make_chunk(10)]) == [True]


async def test_chunk_stored_during_a_failing_look_is_charged_once(opened, tmp_path, files):
    paths = await fill(tmp_path, "a", "b")
    files.failing, files.only = {"open": errno.EMFILE}, ".kvr"
    disk = await opened(tmp_path, files=files)
    loop = asyncio.get_running_loop()

    class StoresFirst(dict):
        """Errors of the thread that looks; when it asks for the first, the chunk is stored."""

        is_stored = False

        def __getitem__(self, operation):
            if not self.is_stored:
                self.is_stored = True
                storing = asyncio.run_coroutine_threadsafe(put(disk, "a"), loop)
                storing.result(PATIENCE_S)
            return super().__getitem__(operation)

    files.failing, files.only = StoresFirst(files.failing), paths["a"].name
    await look_again(disk)
    assert (disk.stats()["unread_files"], used_blocks(disk)) == (0, 2)
    files.failing = {}
    assert await get(disk, "a", "b") == [make_payload("a"), make_payload("b")]


@pytest.mark.parametrize("how", ["remove", "clear tenant", "clear"])
@pytest.mark.parametrize(
    "why", ["unreadable", "later version", "later version, found when read", "file not removed"]
)
async def test_chunk_that_is_not_served_is_removed_with_its_file(opened, tmp_path, files, why, how):
    paths = await fill(tmp_path, "a", "b") | await fill(tmp_path, "c", tenant="other")
    if why == "later version":
        for path in paths.values():
            of_a_later_version(path)
    elif why == "unreadable":
        files.failing = {"open": errno.EMFILE}
    disk = await opened(tmp_path, files=files)
    if why == "later version, found when read":
        for path in paths.values():
            of_a_later_version(path)
        assert await get(disk, "a", "b") == [MissReason.CORRUPT] * 2
        assert await get(disk, "c", tenant="other") == [MissReason.CORRUPT]
    elif why == "file not removed":
        files.failing = {"unlink": errno.EIO}
        keys = [make_key("a"), make_key("b"), make_key("c", tenant="other")]
        assert await disk.batched_remove(keys) == 3
        files.failing.clear()
    if how == "remove":
        assert await disk.batched_remove([make_key("a")]) == 1
        assert await disk.batched_remove([make_key("a")]) == 0
        gone = {"a"}
    else:
        gone = {"a", "b"} if how == "clear tenant" else {"a", "b", "c"}
        assert await disk.clear("default" if how == "clear tenant" else None) == len(gone)
    assert {name for name, path in paths.items() if not path.exists()} == gone
    assert used_blocks(disk) == 3 - len(gone)
    files.failing.clear()
    await look_again(disk)
    assert await get(disk, "a") == [MissReason.NEVER_STORED], "it does not come back"
    if why == "unreadable" and how == "clear tenant":
        assert await get(disk, "c", tenant="other") == [make_payload("c")]


async def test_file_that_fails_while_others_can_be_read_is_set_aside_and_retried(
    opened, tmp_path, files
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
    await look_again(disk)
    assert await disk.batched_contains([make_key("a")]) == [False], "its payload is still not read"
    files.failing.clear()
    await look_again(disk)
    assert await get(disk, "a") == [make_payload("a")]
    assert used_blocks(disk) == 2


@pytest.mark.parametrize("how", ["its content", "the directory", "the directory, made again"])
async def test_emptied_directory_is_forgotten_and_filled_again(opened, tmp_path, files, how):
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
    assert disk.stats()["missing_files"] == 2
    assert await disk.batched_put([make_chunk("a")]) == [True]
    assert await get(disk, "a") == [make_payload("a")]
    assert (num_records(root), used_blocks(disk)) == (1, 1)
    (path,) = root.rglob("*.kvr")
    path.unlink()
    assert await get(disk, "a") == [MissReason.NEVER_STORED], "files that vanish later, too"


async def test_look_while_the_volume_is_gone_forgets_nothing(opened, tmp_path, files):
    root = tmp_path / "disk"
    await fill(root, "a")
    files.failing, files.only = {"open": errno.EMFILE}, ".kvr"
    disk = await opened(root, files=files)
    files.failing = {}
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    await look_again(disk)
    assert disk.stats()["unread_files"] == 1
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    await look_again(disk)
    assert await get(disk, "a") == [make_payload("a")]


class Announced:
    """Counts the chunks of each full announcement."""

    def __init__(self, disk: DiskBackend) -> None:
        self.counts: list[int] = []
        self.announcer = TierAnnouncer("default")
        self.announcer.connect(self, [disk])

    def announce_again(self) -> None:
        self.counts.append(len(list(self.announcer.snapshot())))

    def removed(self, *_: object) -> None: ...


@pytest.mark.parametrize("operation", ["open", "list_directory"])
async def test_chunks_that_can_be_read_later_are_announced(
    opened, tmp_path, monkeypatch, operation
):
    """If the root cannot be listed, it is read as a whole later."""

    class Counted(TroubledFiles):
        num_failures = 0

        def check(self, operation, path):
            self.num_failures += operation in self.failing
            super().check(operation, path)

    await fill(tmp_path, *range(NUM_CHUNKS))
    monkeypatch.setattr(backend, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(backend, "LOAD_WAIT_S", 0.0)
    files = Counted({operation: errno.EMFILE})
    files.may_list.clear()
    disk = await opened(tmp_path, files=files)
    announced = Announced(disk)
    announcing = asyncio.ensure_future(announced.announcer.announce_when_loaded(disk))
    files.may_list.set()
    await announcing
    enough = files.num_failures + 3 * (NUM_CHUNKS if operation == "open" else 1)
    await until(lambda: files.num_failures >= enough)
    assert announced.counts == [0], "looks that find nothing announce nothing"
    files.failing = {}
    await until(lambda: len(announced.counts) > 1)
    assert announced.counts == [0, NUM_CHUNKS]
