"""The documented methods of LocalDiskBackend, from any thread, on the chunks of the async ones."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest
import torch
from lmcache_core.documented import disk as documented
from lmcache_core.documented.disk import LocalDiskBackend
from lmcache_core.errors import UnavailableError
from lmcache_core.memory import ArenaAllocator, MemoryFormat
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.disk import DiskFiles
from lmcache_core.storage.disk.layout import DiskLayout

from tests.fixtures.waiting import until
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

SHAPE = (2, 3, 16, 24)
CAPACITY_BYTES = 1 << 20
KEY = make_key("kv").key


class Gate(DiskFiles):
    """Files that wait to be written or read until they may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_read = threading.Event()
        self.may_write.set()
        self.may_read.set()
        self.num_reads = 0

    def write(self, fd, buffers):
        assert self.may_write.wait(60)
        super().write(fd, buffers)

    def read(self, fd, buffer, at):
        self.num_reads += 1
        assert self.may_read.wait(60)
        return super().read(fd, buffer, at)


@pytest.fixture
def arena():
    arena = ArenaAllocator.anonymous(1 << 20)
    yield arena
    arena.check_integrity()
    assert arena.used_bytes == 0, "a reference was not given back"


@pytest.fixture
def files():
    return Gate()


@pytest.fixture
async def disk(tmp_path, arena, files):
    backend = LocalDiskBackend(tmp_path, CAPACITY_BYTES, files=files, memory_allocator=arena)
    await backend.open()
    yield backend
    files.may_write.set()
    files.may_read.set()
    await backend.close()
    backend.check_integrity()


def make_kv(arena, dtype=torch.bfloat16):
    memory_obj = arena.allocate(SHAPE, dtype, MemoryFormat.KV_BLOB)
    memory_obj.tensor.copy_(
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    )
    return memory_obj


def bits(memory_obj):
    return memory_obj.tensor.clone().view(torch.uint8)


async def test_a_chunk_keeps_its_shape_and_dtype(disk, arena):
    kv = make_kv(arena)
    stored = bits(kv)
    task = disk.submit_put_task(KEY, kv)
    kv.ref_count_down()
    assert await asyncio.wrap_future(task) is True
    assert disk.contains(KEY)
    with await asyncio.to_thread(disk.get_blocking, KEY) as got:
        assert torch.equal(bits(got), stored)
        assert (got.tensor.dtype, tuple(got.tensor.shape)) == (torch.bfloat16, SHAPE)
        assert got.get_memory_format() is MemoryFormat.KV_BLOB


async def test_a_put_holds_its_memory_until_it_is_written_and_is_accepted_once(disk, arena, files):
    files.may_write.clear()
    kv = make_kv(arena)
    task = disk.submit_put_task(KEY, kv)
    assert disk.exists_in_put_tasks(KEY)
    assert kv.get_ref_count() == 2
    assert disk.submit_put_task(KEY, kv) is None
    assert await disk.async_save_bytes_to_disk(KEY, kv) is False
    assert not disk.contains(KEY), "it is visible when it is complete, not before"
    files.may_write.set()
    assert await asyncio.wrap_future(task)
    assert not disk.exists_in_put_tasks(KEY)
    assert kv.get_ref_count() == 1
    again = disk.submit_put_task(KEY, kv)
    assert await asyncio.wrap_future(again), "it is there already"
    kv.ref_count_down()


async def test_waiting_puts_are_bounded(disk, arena, files, monkeypatch):
    monkeypatch.setattr(documented, "MAX_PUT_TASKS", 2)
    files.may_write.clear()
    kv = make_kv(arena)
    tasks = [disk.submit_put_task(make_key(i), kv) for i in range(3)]
    assert [task is None for task in tasks] == [False, False, True]
    files.may_write.set()
    await asyncio.wait([asyncio.wrap_future(task) for task in tasks[:2]])
    assert disk.submit_put_task(make_key(2), kv) is not None
    kv.ref_count_down()


async def test_an_absent_chunk_is_a_miss_of_every_method(disk):
    assert disk.submit_prefetch_task(KEY) is None
    assert disk.get_blocking(KEY) is None
    assert disk.load_bytes_from_disk(KEY) is None
    assert await disk.async_load_bytes_from_disk(KEY) is None
    assert disk.load_disk(KEY) == Miss(MissReason.NEVER_STORED)
    assert disk.remove(KEY) is False
    assert disk.contains(KEY) is False
    assert disk.exists_in_put_tasks(KEY) is False
    assert disk.insert_key(KEY) is False


async def test_every_way_of_loading_gives_the_caller_a_reference(disk, arena):
    kv = make_kv(arena)
    assert await disk.async_save_bytes_to_disk(KEY, kv)
    result = disk.load_disk(KEY)
    assert isinstance(result, Chunk)
    assert (result.key, result.header.tensors[0].shape, result.tier) == (
        make_key("kv"),
        SHAPE,
        disk.name,
    )
    result.release()
    task = disk.submit_prefetch_task(KEY)
    assert isinstance(task, Future)
    for got in (
        disk.load_bytes_from_disk(KEY),
        await disk.async_load_bytes_from_disk(KEY),
        await asyncio.wrap_future(task),
    ):
        assert torch.equal(bits(got), bits(kv))
        got.ref_count_down()
    kv.ref_count_down()


async def test_the_record_of_another_process_is_served_once_its_key_is_inserted(disk, tmp_path):
    chunk = make_chunk("a")
    path = DiskLayout(tmp_path).record(chunk.key)
    path.parent.mkdir(parents=True)
    path.write_bytes(make_record("b"))
    assert disk.insert_key(chunk.key) is False, "the record of another key"
    path.write_bytes(make_record("a")[:-1])
    assert disk.insert_key(chunk.key) is False, "half a record"
    path.write_bytes(make_record("a"))
    assert disk.insert_key(chunk.key, make_chunk("x", payload=b"of another size").memory) is False
    assert not disk.contains(chunk.key)
    assert disk.insert_key(chunk.key, chunk.memory) is True
    assert disk.insert_key(chunk.key) is True
    with disk.get_blocking(chunk.key) as got:
        assert bytes(got.byte_array) == make_payload("a")
    assert disk.stats()["used_bytes"] == 4096


async def test_a_disk_that_hangs_costs_a_bounded_wait_and_no_memory(
    disk, arena, files, monkeypatch
):
    monkeypatch.setattr(documented, "BLOCKING_WAIT_S", 0.05)
    kv = make_kv(arena)
    assert await disk.async_save_bytes_to_disk(KEY, kv)
    kv.ref_count_down()
    files.may_read.clear()
    assert await asyncio.to_thread(disk.get_blocking, KEY) is None
    num_reads = files.num_reads
    loading = asyncio.ensure_future(disk.async_load_bytes_from_disk(KEY))
    await until(lambda: files.num_reads > num_reads)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    files.may_read.set()
    await until(lambda: not arena.used_bytes)


async def test_a_tier_that_is_closed_says_so_and_gives_back_what_waited(tmp_path, arena, files):
    disk = LocalDiskBackend(
        tmp_path, CAPACITY_BYTES, files=files, num_threads=1, memory_allocator=arena
    )
    kv = make_kv(arena)
    with pytest.raises(UnavailableError):
        disk.submit_put_task(KEY, kv)
    await disk.open()
    files.may_write.clear()
    writing = disk.submit_put_task(KEY, kv)
    saving = asyncio.ensure_future(disk.async_save_bytes_to_disk(make_key(2), kv))
    await until(lambda: writing.running() and kv.get_ref_count() >= 3)
    closing = asyncio.ensure_future(disk.close())
    await until(saving.done)
    files.may_write.set()
    await closing
    assert writing.result() is True
    assert await saving is False
    assert kv.get_ref_count() == 1
    kv.ref_count_down()
    with pytest.raises(UnavailableError):
        await disk.async_save_bytes_to_disk(KEY, kv)
    for call in (disk.submit_put_task, disk.insert_key):
        with pytest.raises(UnavailableError):
            call(KEY, kv)
    for call in (
        disk.get_blocking,
        disk.submit_prefetch_task,
        disk.load_disk,
        disk.load_bytes_from_disk,
        disk.remove,
    ):
        with pytest.raises(UnavailableError):
            call(KEY)


async def test_a_record_that_does_not_fit_is_not_inserted(tmp_path):
    disk = LocalDiskBackend(tmp_path, 4096)
    await disk.open()
    large = make_chunk("large", payload=bytes(8192))
    path = DiskLayout(tmp_path).record(large.key)
    path.parent.mkdir(parents=True)
    path.write_bytes(large.head + bytes(8192))
    assert disk.insert_key(large.key) is False
    await disk.close()
    disk.check_integrity()


async def test_tenants_are_apart(disk, arena):
    kv = make_kv(arena)
    assert await disk.async_save_bytes_to_disk(make_key("kv", tenant="acme"), kv)
    kv.ref_count_down()
    assert not disk.contains(KEY)
    assert disk.contains(make_key("kv", tenant="acme"))


async def test_a_damaged_file_is_a_miss_and_so_is_a_lack_of_memory(disk, arena, tmp_path):
    kv = make_kv(arena)
    assert await disk.async_save_bytes_to_disk(KEY, kv)
    rest = arena.allocate((arena.capacity_bytes - arena.used_bytes,), None)
    assert disk.load_disk(KEY) == Miss(MissReason.NO_MEMORY)
    rest.ref_count_down()
    [path] = tmp_path.rglob("*.kvr")
    record = bytearray(path.read_bytes())
    record[-1] ^= 1
    path.write_bytes(record)
    assert disk.get_blocking(KEY) is None
    assert not disk.contains(KEY)
    kv.ref_count_down()
