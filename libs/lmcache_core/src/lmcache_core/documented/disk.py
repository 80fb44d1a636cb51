"""The disk tier with methods for one chunk at a time, from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj
from lmcache_core.memory.buffer import BufferAllocator
from lmcache_core.names import DISK_TIER
from lmcache_core.record import (
    RAW_SERDE,
    UNSEALED_DIGEST,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    raw_header,
)
from lmcache_core.storage.disk.backend import DiskBackend

MAX_PUT_TASKS = 1024
"""Chunks that may wait to be written; each keeps its memory until then."""
BLOCKING_WAIT_S = 10.0
"""How long `get_blocking` and `remove` wait for a disk that does not answer."""

DiskKey = CacheEngineKey | ChunkKey


class LocalDiskBackend(DiskBackend):
    """A disk tier that also keeps and returns single chunks as memory objects.

    A key is a `CacheEngineKey`, which belongs to the default tenant, or a `ChunkKey`. Each method
    may be called from any thread while the tier is open. What is read is verified; it comes in
    memory of the tier's allocator with the shape and dtype it was stored with, and the caller owns
    the reference. Nothing raises for a chunk that is missing, damaged or does not fit; a tier that
    is not open raises `UnavailableError`.

    Args:
        memory_allocator: Where chunks are read to; without one, plain bytes.
        options: Further arguments of `DiskBackend`.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        *,
        memory_allocator: MemoryAllocatorInterface | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, capacity_bytes, **options)
        self._allocator = memory_allocator or BufferAllocator()
        self._put_lock = threading.Lock()
        self._being_put: set[ChunkKey] = set()

    def contains(self, key: DiskKey) -> bool:
        """Return whether a chunk is held. Does not count as an access."""
        return self._index.contains_many([_name(key)])[0]

    def exists_in_put_tasks(self, key: DiskKey) -> bool:
        """Return whether `submit_put_task` or `async_save_bytes_to_disk` is about to write it."""
        with self._put_lock:
            return _name(key) in self._being_put

    def submit_put_task(self, key: DiskKey, memory_obj: MemoryObj) -> Future[bool] | None:
        """Write a chunk in the background.

        Args:
            memory_obj: Its payload. The task takes a reference of its own and gives it back when it
                is done; the content must not change until then.

        Returns:
            Whether the chunk is held when the task has ended; cancelled when the tier is closed
            before. None: not taken, since it is being written already, since `MAX_PUT_TASKS` are,
            or since the directory has not been read yet.
        """
        name = _name(key)
        self._pool.check_open()
        if not self._store.is_loaded:
            return None
        with self._put_lock:
            if name in self._being_put or len(self._being_put) >= MAX_PUT_TASKS:
                return None
            self._being_put.add(name)

        def forget(_: object) -> None:
            with self._put_lock:
                self._being_put.discard(name)

        try:
            future = self._submit_write(_chunk_of(name, memory_obj))
        except BaseException:
            forget(None)
            raise
        future.add_done_callback(forget)
        return future

    async def async_save_bytes_to_disk(self, key: DiskKey, memory_obj: MemoryObj) -> bool:
        """Await `submit_put_task`; False also when the task was not taken. Cancelled, a write
        that has begun continues.
        """
        future = self.submit_put_task(key, memory_obj)
        if future is None:
            return False
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            return False  # the tier was closed

    def submit_prefetch_task(self, key: DiskKey) -> Future[MemoryObj | None] | None:
        """Read a chunk in the background.

        Returns:
            A future of the memory object, which the caller then owns, or of None if reading
            failed. None instead of a future: the chunk is not held.
        """
        name = _name(key)
        self._pool.check_open()
        return self._pool.submit(self.load_bytes_from_disk, name) if self.contains(name) else None

    def get_blocking(self, key: DiskKey) -> MemoryObj | None:
        """Read a chunk in one of the tier's threads and wait for it, `BLOCKING_WAIT_S` seconds
        at most; None is a miss.
        """
        future = self.submit_prefetch_task(key)
        if future is None:
            return None
        try:
            return future.result(BLOCKING_WAIT_S)
        except concurrent.futures.CancelledError:
            return None  # the tier was closed
        except concurrent.futures.TimeoutError:
            _give_back_later(future)
            return None

    async def async_load_bytes_from_disk(self, key: DiskKey) -> MemoryObj | None:
        """Read a chunk in one of the tier's threads; None is a miss. Cancelled, it gives its
        memory back.
        """
        name = _name(key)
        return (
            await self._pool.run(self.load_bytes_from_disk, name, discard=_give_back)
            if self.contains(name)
            else None
        )

    def load_bytes_from_disk(self, key: DiskKey) -> MemoryObj | None:
        """Read a chunk in the caller's thread, for as long as the disk takes; None is a miss."""
        result = self.load_disk(key)
        return result.memory if isinstance(result, Chunk) else None

    def load_disk(self, key: DiskKey) -> Result:
        """Read a chunk in the caller's thread, with its record's header; or the reason why there
        is none.
        """
        self._pool.check_open()
        name = _name(key)
        entry = self._index.find(name)
        if isinstance(entry, Miss):
            return entry
        header = self._store.describe(name, entry)
        if isinstance(header, Miss):
            return header
        memory = _allocate(self._allocator, header, entry.payload_bytes)
        return (
            Miss(MissReason.NO_MEMORY) if memory is None else self._store.read(name, entry, memory)
        )

    def insert_key(self, key: DiskKey, memory_obj: MemoryObj | None = None) -> bool:
        """Serve a record that another process has put in its place in the directory, without
        reading its payload.

        Args:
            memory_obj: What the record should hold; one of another size is not inserted.

        Returns:
            Whether the chunk is held now.
        """
        self._pool.check_open()
        name = _name(key)
        if not self._store.is_loaded:
            return False
        return self._store.adopt(name, None if memory_obj is None else memory_obj.get_size())

    def remove(self, key: DiskKey) -> bool:
        """Forget a chunk and remove its file; whether it was held. Waits until the directory has
        been read, `BLOCKING_WAIT_S` at most.
        """
        self._pool.check_open()
        if self._loading is not None:
            concurrent.futures.wait([self._loading], BLOCKING_WAIT_S)
        return self._store.remove([_name(key)]) == 1


def _name(key: DiskKey) -> ChunkKey:
    return key if isinstance(key, ChunkKey) else ChunkKey.of(DEFAULT_TENANT, key)


def _chunk_of(name: ChunkKey, memory_obj: MemoryObj) -> Chunk:
    meta = memory_obj.metadata
    is_tensor = meta.dtype is not None
    header = raw_header(
        name.key,
        meta.shape if is_tensor else (memory_obj.get_size(),),
        meta.dtype if is_tensor else "uint8",
        UNSEALED_DIGEST,
    )
    return Chunk.unsealed(name, header, memory_obj, DISK_TIER)


def _allocate(
    allocator: MemoryAllocatorInterface, header: RecordHeader, payload_bytes: int
) -> MemoryObj | None:
    """Return memory of the shape and dtype of the one raw tensor in a record; flat bytes when it
    holds anything else.
    """
    if (
        header.serde == RAW_SERDE
        and len(header.tensors) == 1
        and (spec := header.tensors[0]).dtype != "uint8"
    ):
        return allocator.allocate(spec.shape, spec.dtype, MemoryFormat.KV_BLOB)
    return allocator.allocate((payload_bytes,), None, MemoryFormat.BINARY)


def _give_back(memory_obj: MemoryObj | None) -> None:
    if memory_obj is not None:
        memory_obj.ref_count_down()


def _give_back_later(future: Future[MemoryObj | None]) -> None:
    if not future.cancel():
        future.add_done_callback(
            lambda done: (
                _give_back(done.result())
                if not done.cancelled() and done.exception() is None
                else None
            )
        )
