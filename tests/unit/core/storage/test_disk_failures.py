"""A disk that is full, read-only or broken costs hits and nothing else, and is found healed."""

from __future__ import annotations

import errno
import resource

import pytest
from lmcache_core.record import MissReason
from lmcache_core.storage.disk.backoff import MAX_PAUSE_S, MIN_PAUSE_S, SETTLED_S, WriteBackoff
from lmcache_core.storage.disk.layout import BLOCK_BYTES

from tests.fixtures.disk_tier import Clock, file_of, get
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
