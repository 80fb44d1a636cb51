"""The section `bench` of docs/benchmarks.md: host memory, slower tiers, naming tokens, scheduler
queries, and what a chunk costs apart from its bytes.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lmcache_core.engine import ChunkStore, LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector, VLLMPagedMemGPUConnectorV2
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import ArenaAllocator, MemoryFormat, MemoryObj
from lmcache_core.record import UNSEALED_DIGEST, Chunk, Result, Staged, raw_header
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.token_database import ChunkedTokenDatabase, RadixTokenDatabase, chain_hashes
from lmcache_core.token_database.hashing import tokens_as_uint32
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment
from lmcache_kernels.pages import Pages
from typing_extensions import override

from tests.bench.engines import (
    ARENA_GB,
    CHUNK_BYTES,
    CHUNK_SIZE,
    DTYPE,
    HIDDEN,
    NUM_CHUNKS,
    NUM_LAYERS,
    NUM_TOKENS,
    TOTAL_BYTES,
    make_config,
    make_metadata,
    running_engine,
    running_sidecar,
    running_store,
    small_kv,
    tokens_of,
)
from tests.bench.limits import copy_work, redis_limits, socket_limit
from tests.bench.measure import ROUNDS, Figure, Run, in_turn, median_ms, median_ratio, timed
from tests.bench.peer_child import KV, Shape, our_arguments
from tests.bench.report import WITH_ROUNDS, Findings, Section, rates
from tests.fixtures.chains import chain_of, keys_of_rank, store_chunks
from tests.fixtures.paged_cases import paged_gather, paged_scatter
from tests.fixtures.redis_server import running_redis

PROMPT = "4,096 tokens, Llama-3.1-8B shape, bf16: 512 MiB"
VERIFY_HOT = ("always", "never")
REMOTE_TIMEOUT_S = 120.0
SAMPLE_BYTES = 64

MANY_ROUNDS = 41
"""A round of naming takes milliseconds."""
NAMED_TOKENS, LOOKED_UP_TOKENS = 1_000_000, 100_000
NAMED = make_metadata("bench/identity", (1, 2, CHUNK_SIZE, 1, 8))
"""KV so small that all looked up tokens fit into memory."""

QUERIED_CHUNKS, QUERY_ROUNDS = 400, 201

SMALL_TOKENS, PROMPT_CHUNKS, SMALL_PROMPTS = 16, 16, 50
COUNTED_CHUNKS = 1024
SMALL_GOALS_US = {"store": 25, "retrieve": 20}


def measure(run: Run, directory: Path) -> Findings:
    """Measure everything; takes about two minutes.

    Args:
        directory: For sockets, files and logs.
    """
    sections = [
        rates(f"Host memory: {PROMPT}", list(_host_memory(run, directory))),
        rates(f"Slower tiers: {PROMPT}", list(_slower_tiers(run, directory))),
        run("hashes, keys, lookups", _naming),
        run("lookup and stage", lambda: _queries(directory)),
        run("small chunks", _small_chunks),
    ]
    return Findings(sections, machine=WITH_ROUNDS)


# --- Host memory ----------------------------------------------------------------------------------


def _host_memory(run: Run, directory: Path) -> Iterator[Figure]:
    copy = copy_work()
    name = "reference: torch copy, one thread"
    yield Figure(name, TOTAL_BYTES, run("limits of this machine", lambda: timed(copy)))
    flat, paged = Shape(), Shape(is_paged=True)
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    for verify_hot in VERIFY_HOT:
        name = f"memory tier, embedded, verify_hot {verify_hot}"
        with running_engine(
            make_config(verify_hot=verify_hot), make_metadata(), connector
        ) as engine:
            yield from run(name, lambda: _moved(engine, name, flat, copy))  # noqa: B023 (run at once)
        name = f"memory tier, sidecar, verify_hot {verify_hot}"
        with running_sidecar(directory, ARENA_GB, verify_hot=verify_hot) as socket:
            config = make_config(sidecar_socket=str(socket))
            with running_engine(config, make_metadata(), connector, None) as engine:
                yield from run(name, lambda: _moved(engine, name, flat, copy))  # noqa: B023
    yield from run("paged gather and scatter", lambda: _bare_pages(paged))
    for verify_hot in VERIFY_HOT:
        name = f"memory tier, embedded, paged, verify_hot {verify_hot}"
        with running_engine(
            make_config(verify_hot=verify_hot),
            make_metadata(),
            VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS),
        ) as engine:
            yield from run(name, lambda: _moved(engine, name, paged, copy))  # noqa: B023


def _moved(
    engine: LMCacheEngine, name: str, shape: Shape, copy: Callable[[int], object]
) -> tuple[Figure, Figure]:
    """Store and retrieve a whole prompt in turn with a plain copy; what comes back is compared."""
    source, target = KV(shape, 1), KV(shape, 0)
    given, filled = our_arguments(source), our_arguments(target)
    stored = in_turn(lambda turn: engine.store(tokens_of(turn), **given), copy)
    last = tokens_of(ROUNDS)
    loaded = in_turn(lambda turn: engine.retrieve(last, **filled), copy)
    if engine.lookup(last) != NUM_TOKENS:
        raise AssertionError(f"{name}: not all is stored")
    source.require_equal(target, f"from {name}")
    return tuple(
        Figure(f"{name}: {what}", TOTAL_BYTES, seconds, None, copies)
        for what, (seconds, copies) in (("store", stored), ("retrieve", loaded))
    )


def _bare_pages(shape: Shape) -> list[Figure]:
    """Gather and scatter all chunks in turn with a torch copy of the same bytes, the limit."""
    source, target = KV(shape, 1), KV(shape, 0)
    chunk_shape = (2, NUM_LAYERS, CHUNK_SIZE, HIDDEN)
    chunks = [torch.zeros(chunk_shape, dtype=DTYPE) for _ in range(NUM_CHUNKS)]

    def each(kv: KV, move: Callable[[Pages, torch.Tensor, torch.Tensor], object]) -> Any:
        pages = Pages.of([layer[0] for layer in kv.tensor], [layer[1] for layer in kv.tensor])
        of_chunk = list(zip(kv.slots().split(CHUNK_SIZE), chunks, strict=True))
        return lambda turn: [move(pages, slots, chunk) for slots, chunk in of_chunk]

    copies, gathers, scatters = in_turn(
        copy_work(), each(source, paged_gather), each(target, paged_scatter)
    )
    source.require_equal(target, "from chunks")
    limit = Figure("reference: torch copy, in turn with the paged copies", TOTAL_BYTES, copies)
    return [
        limit,
        Figure("paged gather, bare", TOTAL_BYTES, gathers, limit),
        Figure("paged scatter, bare", TOTAL_BYTES, scatters, limit),
    ]


# --- Slower tiers ---------------------------------------------------------------------------------


class TierChunks:
    """The chunks of a prompt, written to and read from a tier that has no engine around it.

    Payloads stay the same, keys are new in each turn. Chunks are put without digests, as the engine
    does: what writes them to a file or a socket computes these.
    """

    def __init__(
        self, runner: asyncio.Runner, backend: StorageBackend, num_chunks: int = NUM_CHUNKS
    ) -> None:
        self.run = runner.run
        self.backend = backend
        self._arena = ArenaAllocator.anonymous(2 * num_chunks * CHUNK_BYTES + (16 << 20))
        self.payloads = [self._payload(seed) for seed in range(num_chunks)]
        self.run(backend.open())

    def keys(self, turn: int) -> list[ChunkKey]:
        return [
            ChunkKey.of("default", CacheEngineKey("vllm", "bench", 1, 0, f"{turn:032x}{i:032x}"))
            for i in range(len(self.payloads))
        ]

    def put(self, turn: int) -> None:
        chunks = []
        for key, memory in zip(self.keys(turn), self.payloads, strict=True):
            header = raw_header(key.key, (CHUNK_BYTES,), "uint8", UNSEALED_DIGEST)
            chunks.append(Chunk.unsealed(key, header, memory, "bench"))
        if not all(self.run(self.backend.batched_put(chunks))):
            raise AssertionError("a chunk was not stored")

    def get(self, turn: int) -> None:
        """Read the chunks of a turn into touched memory."""
        results = self.run(self.backend.batched_get(self.keys(turn), self._allocate))
        for result, payload in zip(results, self.payloads, strict=True):
            self._check(result, payload)

    def remove(self, turn: int) -> None:
        self.run(self.backend.batched_remove(self.keys(turn)))

    def _check(self, result: Result, payload: MemoryObj) -> None:
        if (
            not isinstance(result, Chunk)
            or result.memory.byte_array[:SAMPLE_BYTES] != payload.byte_array[:SAMPLE_BYTES]
        ):
            raise AssertionError(f"not served: {result}")
        result.release()

    def _allocate(self, num_bytes: int) -> MemoryObj | None:
        return self._arena.allocate((num_bytes,), None, MemoryFormat.BINARY)

    def _payload(self, seed: int) -> MemoryObj:
        memory = self._allocate(CHUNK_BYTES)
        assert memory is not None
        memory.tensor.random_(generator=torch.Generator().manual_seed(seed))
        return memory


def _slower_tiers(run: Run, directory: Path) -> Iterator[Figure]:
    for fsync in (False, True):
        yield from run("disk", lambda: list(_disk(directory / f"disk-{fsync}", fsync)))  # noqa: B023
    socket = run("raw socket", socket_limit)
    yield socket
    yield from run("lm:// over loopback", lambda: _lm(directory, socket))
    yield from run("Redis over loopback", _redis)


def _disk(directory: Path, fsync: bool) -> Iterator[Figure]:
    """In turn with raw files. Retrieves do not depend on fsync, and are measured without it."""
    directory.mkdir()
    backend = DiskBackend(directory / "tier", 2 * TOTAL_BYTES, fsync=fsync)
    with asyncio.Runner() as runner:
        tier = TierChunks(runner, backend)
        raw = _RawFiles(directory / "raw", tier.payloads[0].byte_array, fsync)

        def make_room(turn: int) -> None:
            tier.run(backend.clear())
            raw.remove()

        def make_cold(turn: int) -> None:
            for path in directory.rglob("*.*"):
                drop_from_cache(path)

        name = f"disk: store {'with' if fsync else 'without'} fsync"
        yield _in_turn_with(name, tier.put, raw.write, make_room)
        if not fsync:
            for name, prepare in (("page cache", None), ("cold", make_cold)):
                yield _in_turn_with(
                    f"disk: retrieve, {name}", lambda _: tier.get(ROUNDS), raw.read, prepare
                )
        make_room(0)
        tier.run(backend.close())


class _RawFiles:
    """The same bytes in files without a format, one a chunk: a temporary name, one write, a rename.

    Args:
        payload: What each of them holds.
        fsync: Sync each file, and the directory after each rename, as the tier does.
    """

    def __init__(self, root: Path, payload: memoryview, fsync: bool) -> None:
        root.mkdir()
        self._root = root
        self._payload = payload
        self._fsync = fsync
        self._target = memoryview(bytearray(CHUNK_BYTES))

    def write(self, turn: int) -> None:
        for i in range(NUM_CHUNKS):
            fd = os.open(self._root / f"{i}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            at = 0
            while at < CHUNK_BYTES:
                at += os.write(fd, self._payload[at:])
            if self._fsync:
                os.fdatasync(fd)
            os.close(fd)
            (self._root / f"{i}.new").rename(self._root / f"{i}.raw")
            if self._fsync:
                directory = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
                os.fsync(directory)
                os.close(directory)

    def read(self, turn: int) -> None:
        for i in range(NUM_CHUNKS):
            fd = os.open(self._root / f"{i}.raw", os.O_RDONLY)
            at = 0
            while at < CHUNK_BYTES:
                at += os.preadv(fd, [self._target[at:]], at)
            os.close(fd)

    def remove(self) -> None:
        for path in self._root.iterdir():
            path.unlink()


def drop_from_cache(path: Path) -> None:
    """Leave nothing of a file in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _lm(directory: Path, limit: Figure) -> list[Figure]:
    """One client, one cache_storage process."""
    settings = {"port": 0, "lm_port": 0, "memory_gb": ARENA_GB, "instance_id": "bench"}
    with Processes(directory, quiet_environment()) as processes, asyncio.Runner() as runner:
        _, ports = processes.start_service("cache_storage", "lmcache_storage", settings)
        url = f"lm://127.0.0.1:{ports['lm_port']}"
        tier = TierChunks(runner, create_remote_backend(url, timeout_s=REMOTE_TIMEOUT_S))
        stores = timed(tier.put, lambda turn: tier.remove(turn - 1))
        loads = timed(lambda _: tier.get(ROUNDS))
        tier.run(tier.backend.close())
    return [
        Figure("lm:// to cache_storage: store", TOTAL_BYTES, stores, limit),
        Figure("lm:// to cache_storage: retrieve", TOTAL_BYTES, loads, limit),
    ]


def _redis() -> list[Figure]:
    with running_redis() as server, asyncio.Runner() as runner:
        set_raw, get_raw = redis_limits(server.port)
        tier = TierChunks(runner, create_remote_backend(server.url, timeout_s=REMOTE_TIMEOUT_S))
        figures = [
            _in_turn_with("redis: store", lambda _: tier.put(0), lambda _: set_raw()),
            _in_turn_with("redis: retrieve", lambda _: tier.get(0), lambda _: get_raw()),
        ]
        tier.run(tier.backend.close())
    return figures


def _in_turn_with(
    name: str,
    work: Callable[[int], object],
    limit: Callable[[int], object],
    prepare: Callable[[int], object] | None = None,
) -> Figure:
    seconds, limit_seconds = in_turn(work, limit, prepare=prepare)
    return Figure(name, TOTAL_BYTES, seconds, None, limit_seconds)


# --- Naming tokens and scheduler queries ----------------------------------------------------------


def _naming() -> Section:
    """Hashes and keys in turn with one SHA-256 over the same tokens, lookups in turn with the
    hashes of their own tokens.
    """
    tokens = _random_tokens(NAMED_TOKENS)
    raw = tokens_as_uint32(tokens).tobytes()
    chunked = ChunkedTokenDatabase(make_config(), NAMED)
    radix = RadixTokenDatabase(make_config(), NAMED)
    if list(radix.process_tokens(tokens)) != list(chunked.process_tokens(tokens)):
        raise AssertionError("the two databases name chunks differently")

    def sha256(turn: int) -> None:
        hashlib.sha256(raw).digest()

    alone = timed(sha256, rounds=MANY_ROUNDS)
    rows = [(f"SHA-256 of {len(raw):,} bytes in one call", median_ms(alone), "", "", "")]

    def add(
        name: str, goal: str, work: Callable[[int], object], limit: Callable[[int], object]
    ) -> None:
        seconds, limits = in_turn(work, limit, rounds=MANY_ROUNDS)
        rows.append((name, median_ms(seconds), f"{median_ratio(seconds, limits):.2f}", goal, ""))

    works = {
        "chunk hashes": ("3.5", lambda _: _hash(tokens)),
        "process_tokens, chunked": ("6", lambda _: list(chunked.process_tokens(tokens))),
        "process_tokens, radix, known": ("", lambda _: list(radix.process_tokens(tokens))),
    }
    for name, (goal, work) in works.items():
        add(f"{name}, {NAMED_TOKENS:,} tokens", goal, work, sha256)
    tokens = _random_tokens(LOOKED_UP_TOKENS)
    for name, database in (("chunked", ChunkedTokenDatabase), ("radix", RadixTokenDatabase)):
        connector = VLLMNestedTupleGPUConnector(8, 1)
        with running_engine(make_config(), NAMED, connector, 32 << 20, database) as engine:
            side = torch.zeros(len(tokens), 1, 8, dtype=DTYPE)
            engine.store(tokens, kvcaches=[(side, side)])
            if engine.lookup(tokens) != len(tokens):
                raise AssertionError("the prompt is not in memory")
            name = f"lookup, {name}, {LOOKED_UP_TOKENS:,} tokens in memory"
            add(name, "2", lambda _: engine.lookup(tokens), lambda _: _hash(tokens))
    return Section("Naming tokens", ("what", "ms", "times reference", "goal", ""), rows)


def _random_tokens(num_tokens: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, 128_256, (num_tokens,), generator=dice)


def _hash(tokens: torch.Tensor) -> None:
    """Compute the chunk hashes and drop them."""
    deque(chain_hashes(bytes(32), tokens_as_uint32(tokens), CHUNK_SIZE), maxlen=0)


def _queries(directory: Path) -> Section:
    """Lookup and stage of chunks that are all in memory, embedded and through the socket."""
    with ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        socket = opened.enter_context(running_sidecar(place, ARENA_GB, verify_hot="never"))
        metadata = make_metadata()
        embedded, _ = opened.enter_context(
            running_store(make_config(verify_hot="never"), metadata, arena_bytes=64 << 20)
        )
        config = make_config(sidecar_socket=str(socket))
        sidecar, _ = opened.enter_context(running_store(config, metadata))
        rows = [*_query_rows("embedded", embedded, ""), *_query_rows("sidecar", sidecar, "1")]
    return Section("Scheduler queries", ("what", "ms", "goal", ""), rows)


def _query_rows(where: str, store: ChunkStore, goal: str) -> list[tuple[str, ...]]:
    chain = chain_of(range(QUERIED_CHUNKS))
    keys = keys_of_rank(chain, 0)
    if store_chunks(store, keys) != QUERIED_CHUNKS:
        raise AssertionError(f"{where}: the prompt is not in memory")

    def look_up(turn: int) -> None:
        if store.lookup(keys, None) != QUERIED_CHUNKS:
            raise AssertionError(f"{where}: the prompt is not found")

    def stage(turn: int) -> None:
        if store.stage(f"request {turn}", [chain]) != Staged(True, (b"\1" * QUERIED_CHUNKS,)):
            raise AssertionError(f"{where}: the prompt is not staged")

    seconds = {
        "lookup": timed(look_up, rounds=QUERY_ROUNDS),
        "stage": timed(stage, rounds=QUERY_ROUNDS),
    }
    store.unstage([f"request {turn}" for turn in range(QUERY_ROUNDS + 1)])
    return [
        (f"{what} of {QUERIED_CHUNKS} chunks, {where}", median_ms(of_what), goal, "")
        for what, of_what in seconds.items()
    ]


# --- Small chunks ---------------------------------------------------------------------------------


class _CountingConnector(VLLMNestedTupleGPUConnector):
    """Notes how many objects there are while chunks are copied."""

    num_objects = 0

    @override
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        super().from_gpu(memory_obj, start, end, **kwargs)
        self.num_objects = max(self.num_objects, sys.getallocatedblocks())

    @override
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        super().to_gpu(memory_obj, start, end, **kwargs)
        self.num_objects = max(self.num_objects, sys.getallocatedblocks())


def _small_chunks() -> Section:
    rows = [row for verify_hot in VERIFY_HOT for row in _small_rows(verify_hot)]
    headings = ("what", "µs a chunk", "goal", "objects a chunk")
    return Section("A chunk of 1 KiB in host memory", headings, rows)


def _small_rows(verify_hot: str) -> Iterator[tuple[str, ...]]:
    config = make_config(verify_hot=verify_hot, chunk_size=SMALL_TOKENS)
    metadata = make_metadata("bench/small", (1, 2, SMALL_TOKENS, 1, 16))
    kv, out = (small_kv(COUNTED_CHUNKS * SMALL_TOKENS) for _ in range(2))
    counting = _CountingConnector(16, 1)

    def store(engine: LMCacheEngine, prompt: torch.Tensor) -> None:
        engine.store(prompt, kvcaches=kv)

    def retrieve(engine: LMCacheEngine, prompt: torch.Tensor) -> None:
        if not engine.retrieve(prompt, kvcaches=out).all():
            raise AssertionError("the prompt is not in memory")

    plain = VLLMNestedTupleGPUConnector(16, 1)
    with (
        running_engine(config, metadata, plain, 64 << 20) as engine,
        running_engine(config, metadata, counting, 64 << 20) as counted,
    ):
        for call in (store, retrieve):
            gc.collect()
            counting.num_objects = before = sys.getallocatedblocks()
            call(counted, _small_prompt(0, COUNTED_CHUNKS))
            objects = (counting.num_objects - before) / COUNTED_CHUNKS

            def prompts(turn: int) -> None:
                for number in range(SMALL_PROMPTS):
                    call(engine, _small_prompt(turn * SMALL_PROMPTS + number, PROMPT_CHUNKS))  # noqa: B023

            median_s = statistics.median(timed(prompts)) / (SMALL_PROMPTS * PROMPT_CHUNKS)
            name = f"{call.__name__}, verify_hot {verify_hot}"
            goal = f"{SMALL_GOALS_US[call.__name__]:g}"
            yield (name, f"{median_s * 1e6:.1f}", goal, f"{objects:.1f}")


def _small_prompt(number: int, num_chunks: int) -> torch.Tensor:
    """A prompt that no other number has."""
    first = number * COUNTED_CHUNKS * SMALL_TOKENS
    return torch.arange(num_chunks * SMALL_TOKENS) + first
