"""What the disk tier does with the directory that it finds at its start."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import MissReason
from lmcache_core.storage.disk import DiskFiles, backend
from lmcache_core.storage.disk.layout import BLOCK_BYTES

from tests.fixtures.disk_tier import TroubledFiles, fill, get, look_again, num_records
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
