"""A chunk whose digest is computed on demand."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.record import (
    UNSEALED_DIGEST,
    Chunk,
    RecordHeader,
    TensorSpec,
    payload_digest,
)

from tests.suites.chunks import make_chunk, make_key, make_payload

NUM_THREADS = 6


class Counting(BytesBufferMemoryObj):
    """Counts its readers; the first waits for another one, a little."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.num_reads = 0
        self._is_overtaken = threading.Event()

    @property
    def byte_array(self) -> memoryview:
        self.num_reads += 1
        if self.num_reads == 1:
            self._is_overtaken.wait(0.1)
        self._is_overtaken.set()
        return super().byte_array


def header_of(key: ChunkKey, num_bytes: int) -> RecordHeader:
    return RecordHeader(
        key.key.canonical(),
        "naive",
        "",
        False,
        (TensorSpec("", "uint8", (num_bytes,), 0, num_bytes),),
        UNSEALED_DIGEST,
    )


def unsealed(name: object, num_bytes: int = 1000) -> Chunk:
    key = make_key(name)
    return Chunk.unsealed(
        key,
        header_of(key, num_bytes),
        BytesBufferMemoryObj(make_payload(name, num_bytes)),
        "memory",
    )


@pytest.mark.parametrize("ask", ["head", "header", "sealed"])
def test_every_part_with_the_digest_seals_the_chunk_to_the_same_record(ask: str) -> None:
    chunk = unsealed("a")
    asked = getattr(chunk, ask)
    if ask == "sealed":
        assert asked() is chunk
    assert chunk.is_sealed
    assert chunk.head == make_chunk("a").head
    assert chunk.header == make_chunk("a").header


def test_parts_without_the_digest_do_not_seal_the_chunk() -> None:
    chunk = unsealed("a")
    assert chunk.described.tensors[0].length == 1000
    assert not chunk.lossy
    assert chunk.num_bytes > 1000
    assert not chunk.moved(chunk.memory, "Other").is_sealed
    assert not chunk.is_sealed


@pytest.mark.parametrize("num_bytes", [0, 511, 4096])
def test_the_size_is_that_of_the_whole_record(num_bytes: int) -> None:
    chunk = unsealed("a", num_bytes)
    before = chunk.num_bytes
    assert before == len(chunk.head) + num_bytes == chunk.num_bytes


def test_threads_that_seal_together_compute_one_digest() -> None:
    key, memory = make_key("a"), Counting(make_payload("a"))
    chunk = Chunk.unsealed(key, header_of(key, 1000), memory, "memory")
    start, heads = threading.Barrier(NUM_THREADS), list[bytes]()

    def seal() -> None:
        start.wait()
        heads.append(chunk.sealed().head)

    threads = [threading.Thread(target=seal) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heads == [make_chunk("a").head] * NUM_THREADS
    assert memory.num_reads == 1


class Overtaken(Chunk):
    """Sealed, as by another thread, right after one of its two halves was read."""

    __slots__ = ("is_armed",)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("_head", "_header") and self.is_armed:
            self.is_armed = False
            self.sealed()
        return value


def test_a_chunk_sealed_while_it_is_moved_is_consistent() -> None:
    chunk = Overtaken.__new__(Overtaken)
    chunk.is_armed = False
    key = make_key("a")
    chunk.__init__(
        key, header_of(key, 1000), None, BytesBufferMemoryObj(make_payload("a")), "memory"
    )  # type: ignore[misc]
    chunk.is_armed = True
    moved = chunk.moved(chunk.memory, "Other")
    assert moved.header.digest == payload_digest(make_payload("a"))
    assert moved.head == make_chunk("a").head
