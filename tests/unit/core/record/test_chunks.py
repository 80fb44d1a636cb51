"""Chunks in memory: which are verified, and digests that are computed on demand."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lmcache_core.concurrency import Workers
from lmcache_core.errors import ConfigError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.record import (
    UNSEALED_DIGEST,
    Chunk,
    HotVerifier,
    RecordHeader,
    TensorSpec,
    payload_digest,
)
from lmcache_core.record.hot_verifier import SAMPLE_INTERVAL

from tests.suites.chunks import make_chunk, make_key, make_payload


@pytest.fixture(params=["threads", "no threads"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers("test-worker", 2)
    if request.param == "threads":
        made.open()
    yield made
    made.close()


class Watched(BytesBufferMemoryObj):
    """Memory that counts its readers, and lets them wait at a gate."""

    def __init__(self, data: bytes, gate: threading.Event | None = None) -> None:
        super().__init__(data)
        self.num_looks = 0
        self.gate = gate

    @property
    def byte_array(self) -> memoryview:
        self.num_looks += 1
        if self.gate is not None:
            assert self.gate.wait(60.0)
        return super().byte_array


def chunk_in(name: object, memory: BytesBufferMemoryObj) -> Chunk:
    made = make_chunk(name)
    return Chunk(made.key, made.header, made.head, memory, "memory")


def damaged(name: object) -> Chunk:
    data = bytearray(make_payload(name))
    data[len(data) // 2] ^= 1
    return chunk_in(name, BytesBufferMemoryObj(bytes(data)))


def test_never_reads_and_seals_nothing(workers: Workers) -> None:
    memory, made = Watched(make_payload(0)), make_chunk(2)
    unsealed = Chunk.unsealed(made.key, made.header, made.memory, "memory")
    verifier = HotVerifier("never")
    assert not verifier.needs_digests
    assert verifier.num_intact([chunk_in(0, memory), damaged(1), unsealed], workers) == 3
    assert memory.num_looks == 0
    assert not unsealed.is_sealed


def test_sampled_verifies_one_in_each_interval_across_calls(workers: Workers) -> None:
    verifier = HotVerifier("sampled")
    assert verifier.needs_digests
    memories = [Watched(make_payload(i)) for i in range(5 * SAMPLE_INTERVAL)]
    chunks = [chunk_in(i, memory) for i, memory in enumerate(memories)]
    assert sum(
        verifier.num_intact(chunks[at : at + 10], workers) for at in range(0, len(chunks), 10)
    ) == len(chunks)
    looked_at = [i for i, memory in enumerate(memories) if memory.num_looks]
    assert [i // SAMPLE_INTERVAL for i in looked_at] == list(range(5)), "one in each sixteen"


@pytest.mark.parametrize("num_chunks", [2, SAMPLE_INTERVAL, 3 * SAMPLE_INTERVAL])
def test_sampled_chooses_every_chunk_of_repeated_loads_at_some_time(num_chunks: int) -> None:
    """Also if each load asks for a multiple, or a divisor, of the interval."""
    verifier = HotVerifier("sampled", random.Random(7))
    chosen = {
        i
        for _ in range(200 * SAMPLE_INTERVAL // num_chunks)
        for i in range(num_chunks)
        if verifier.chooses()
    }
    assert chosen == set(range(num_chunks))


def test_the_result_waits_for_all_readers() -> None:
    """The caller gives the memory back at once."""
    workers = Workers("test-worker", 2)
    workers.open()
    gate = threading.Event()
    slow = Watched(make_payload(1), gate)
    verdicts: list[int] = []
    asking = threading.Thread(
        target=lambda: verdicts.append(
            HotVerifier("always").num_intact([damaged(0), chunk_in(1, slow)], workers)
        )
    )
    asking.start()
    asking.join(0.1)
    assert asking.is_alive(), "the first is damaged, but the second is still being read"
    gate.set()
    asking.join(60.0)
    assert verdicts == [0]
    workers.close()


def test_an_unknown_mode_is_refused_unless_it_comes_from_a_sidecar() -> None:
    with pytest.raises(ConfigError, match="verify_hot='often'"):
        HotVerifier("often")
    assert HotVerifier.lenient("often").mode == "always"
    assert HotVerifier.lenient("never").mode == "never"


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
