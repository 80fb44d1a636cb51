"""A worker's side: chunks between vLLM's blocks and a chunk store."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import create_chunk_store
from lmcache_core.gpu_connectors import PagedGPUConnector
from lmcache_core.gpu_connectors import staging as staging_module
from lmcache_core.integrations.vllm import worker as worker_module
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.plan import ChunkRun, Load, StepPlan, Store
from lmcache_core.integrations.vllm.worker import (
    STORE_PATIENCE,
    STORE_QUESTIONS,
    RefusingWorker,
    WorkerSide,
)
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.telemetry import (
    FAILED_CALLS_TOTAL,
    MISSED_CHUNKS_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
    Counters,
)

from tests.fixtures import cuda_streams
from tests.fixtures.held_clock import HeldClock
from tests.fixtures.vllm_engine import FULL, MLA, Shape, window
from tests.fixtures.vllm_engine.memory import POISON, RankMemory
from tests.fixtures.vllm_engine.parts import METADATA, PLAIN, groups_of, options_of
from tests.fixtures.vllm_engine.shapes import HND, LATENT_4D, PACKED
from tests.fixtures.vllm_engine.stores import RecordingStore, WrappedStore
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE
from tests.fixtures.waiting import wait_until

HASHES = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(5))
BLOCKS, OTHER_BLOCKS = (5, 3, 9, 4, 6, 8), (20, 19, 30, 31, 12, 11)
PATIENCE_S = 60.0
TIER_TIMEOUT_S = PATIENCE_S * worker_module.STEP_SHARE
"""A step waits this long for its stores, or a busy machine would have them given up."""


@dataclass
class Rank:
    """A worker's side and vLLM's memory."""

    side: WorkerSide
    memory: RankMemory
    counters: Counters
    width: int

    def fill(self, blocks: tuple[int, ...], group: int = 0, base: float = 0.0) -> None:
        """Give every token of these blocks, and every layer, other numbers."""
        for layer in range(2):
            cells = (
                torch.arange(4 * len(blocks) * self.width, dtype=torch.float32).view(-1, self.width)
                + base
                + 10_000 * layer
            )
            self.memory.write(group, layer, *slots(blocks), cells)

    def read(self, blocks: tuple[int, ...], group: int = 0) -> torch.Tensor:
        return torch.stack([self.memory.read(group, layer, *slots(blocks)) for layer in range(2)])

    def run(self, plan: StepPlan) -> tuple[set[str], set[str], set[int], Any]:
        """One step of a runner; received, failed, bad blocks, report."""
        self.side.begin_loads(plan)
        self.side.wait_for_copies()
        self.side.store(plan)
        self.side.wait_for_copies()
        received, failed = self.side.take_received()
        return received, failed, self.side.take_bad_blocks(), self.side.take_report()

    def received(self) -> tuple[set[str], set[str]]:
        """The next load to end: received, failed."""
        results: list[tuple[set[str], set[str]]] = []

        def has_ended() -> bool:
            results.append(self.side.take_received())
            return any(results[-1])

        wait_until(has_ended)
        return results[-1]


def slots(blocks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(4 * len(blocks))
    return torch.tensor(blocks)[places // 4], places % 4


def storing(blocks: tuple[int, ...] = BLOCKS, group: int = 0, first: int = 0) -> StepPlan:
    return StepPlan(stores=(Store("r", (run_of(blocks, group, first),)),))


def loading(
    blocks: tuple[int, ...], begin: int, end: int, group: int = 0, first: int = 0
) -> StepPlan:
    return StepPlan((Load("r", begin, end, (run_of(blocks, group, first),)),))


def run_of(blocks: tuple[int, ...], group: int = 0, first: int = 0) -> ChunkRun:
    return ChunkRun(group, first, HASHES[32 * first : 32 * (first + len(blocks) // 2)], blocks)


@pytest.fixture
def store() -> Iterator[ChunkStore]:
    allocator = HostMemoryAllocator(1 << 20)
    made = create_chunk_store(options_of().engine, METADATA, allocator, Counters())
    made.open(lambda salt: None)
    yield made
    made.close()
    assert allocator.used_bytes == 0, "a reference was not given back"


@pytest.fixture
def rank(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    monkeypatch.setattr(worker_module, "JOIN_S", PATIENCE_S)
    with contextlib.ExitStack() as opened:

        def make(
            shape: Shape = PLAIN,
            number: int = 0,
            wrap: Any = None,
            is_told_late: bool = False,
            has_neighbours: bool = False,
            **options: Any,
        ) -> Rank:
            counters = Counters()
            identity = KVIdentity(
                replace(METADATA, world_size=shape.num_ranks),
                shape.num_ranks // shape.replicas,
                shape.replicas,
            )
            inner = store if wrap is None else wrap(store)
            guard = DegradingGuard(counters, raised=())
            side = WorkerSide(
                options_of(**{"tier_timeout_s": TIER_TIMEOUT_S} | options),
                groups_of(shape),
                identity,
                number,
                inner,
                counters,
                guard,
                is_told_late=is_told_late,
                has_neighbours=lambda: has_neighbours,
            )
            opened.callback(side.close)
            memory = RankMemory(shape)
            side.register(memory.by_name, shape.num_blocks)
            heads, sides, size = shape.cell_shape
            return Rank(side, memory, counters, heads * sides * size)

        yield make


def test_nothing_is_kept_of_the_check_of_vllms_memory(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may register its tensors inside a memory pool that sleep mode empties later: what was
    made there on the device is then garbage.
    """
    made: list[weakref.ref[Any]] = []
    canary = worker_module.run_canary

    def checked(connector: PagedGPUConnector, kvcaches: Any, *args: Any) -> None:
        canary(connector, kvcaches, *args)
        made.append(weakref.ref(connector))
        made.extend(weakref.ref(pages.table) for pages in connector.binding_of(kvcaches).pages)

    monkeypatch.setattr(worker_module, "run_canary", checked)
    here = rank(Shape(layout=HND), layout="tokens")
    gc.collect()
    assert len(made) > 1
    assert not any(ref() is not None for ref in made)
    here.fill(BLOCKS)
    here.run(storing())
    assert here.counters.value(STORED_CHUNKS_TOTAL) == 3


LAYOUTS = pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("blocks", Shape()),
        ("tokens", Shape(layout=HND)),
        ("blocks", Shape((MLA,), layout=PACKED)),
        ("tokens", Shape((MLA,), layout=LATENT_4D)),
    ],
    ids=["blocks", "tokens", "latent blocks", "latent tokens"],
)


@LAYOUTS
@pytest.mark.parametrize(("begin", "end"), [(0, 24), (4, 20), (12, 16)])
def test_only_wanted_blocks_are_written(
    rank: Callable[..., Rank], layout: str, shape: Shape, begin: int, end: int
) -> None:
    """vLLM has the tokens before them itself, maybe in blocks that others use, too."""
    here, there = rank(shape, layout=layout), rank(shape, layout=layout)
    here.fill(BLOCKS)
    here.run(storing())
    there.run(loading(OTHER_BLOCKS, begin, end))
    got, stored = there.read(OTHER_BLOCKS), here.read(BLOCKS)
    assert torch.equal(got[:, begin:end], stored[:, begin:end])
    assert (got[:, :begin] == POISON).all()
    assert (got[:, end:] == POISON).all()


@pytest.fixture
def recorded() -> list[RecordingStore]:
    return []


def test_nothing_is_stored_while_that_costs_more_than_it_saves(
    rank: Callable[..., Rank], recorded: list[RecordingStore]
) -> None:
    savings: list[float] = []

    class Late(RecordingStore):
        def is_worth(self, saving_s: float) -> bool:
            savings.append(saving_s)
            return False

    def wrap(store: ChunkStore) -> Late:
        recorded.append(Late(store))
        return recorded[-1]  # type: ignore[return-value]

    here = rank(wrap=wrap)
    recorded[0].calls.clear()
    here.run(replace(storing(), recompute_s=2.0))
    assert recorded[0].calls == []
    assert savings == [2.0 * 3 * STORE_PATIENCE / STORE_QUESTIONS]
    assert here.counters.value(UNSTORED_CHUNKS_TOTAL) == 3


def test_load_of_several_groups_fails_from_the_first_missing_chunk_on(
    rank: Callable[..., Rank],
) -> None:
    """Blocks before it would count as verified."""
    here = rank(Shape((FULL, window(24))))
    for group, blocks in ((0, BLOCKS[:4]), (1, BLOCKS[:2])):
        here.fill(blocks, group)
        here.run(storing(blocks, group))
    runs = (run_of(OTHER_BLOCKS), run_of(OTHER_BLOCKS, 1))
    for order in (runs, runs[::-1]):
        assert here.run(StepPlan((Load("r", 0, 24, order),)))[3].failed == {"r": 8}


def test_load_without_blocks_is_refused(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM gives a block for everything that it wants loaded; its null block is never written."""
    here = rank()
    here.fill(BLOCKS)
    here.run(storing())
    for blocks in ((20, 21, 0, 22), (0, 20, 21, 22), (20, 21, 22, 0)):
        assert here.run(loading(blocks, 0, 16))[2] == {20, 21, 22}
    assert here.run(loading((0, 0, 0, 0), 0, 16))[3].failed == {"r": 0}
    assert here.run(loading((20, 21, 22, 23), 0, 20))[2] == {20, 21, 22, 23}, (
        "no chunk was named for the last tokens"
    )
    assert (here.read((0, 20, 21, 22, 23)) == POISON).all()
    assert caplog.text.count("block or chunk missing") == 5


def test_worker_without_copies_releases_held_requests_at_once() -> None:
    """Else vLLM would keep their blocks."""
    refusing = RefusingWorker(reports_blocks=True)
    refusing.begin_loads(StepPlan(held=("r", "other")))
    assert refusing.take_sent() == {"r", "other"}
    assert refusing.take_sent() == set()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> cuda_streams.Runtime:
    return cuda_streams.install(monkeypatch)


def test_load_waits_for_earlier_steps_and_not_for_its_own(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    """An earlier step may still write to the blocks. Nothing waits in vLLM's thread."""
    here = rank()
    here.fill(BLOCKS)
    here.run(storing())
    runtime.waited_by.clear()
    runtime.log.clear()
    ended: list[str] = []
    runtime.compute.launch(lambda: here.fill(OTHER_BLOCKS, base=1e6))
    plan = loading(OTHER_BLOCKS, 0, 24)
    here.side.begin_step(plan)
    runtime.compute.launch(lambda: ended.append("the step"))
    here.side.begin_loads(plan)
    assert here.received() == ({"r"}, set())
    assert torch.equal(here.read(OTHER_BLOCKS), here.read(BLOCKS))
    assert not ended
    assert set(runtime.waited_by) == {"lmcache-loads"}
    assert len({line for line in runtime.log if line.startswith("copy")}) == 2
    assert "copy 0" not in runtime.log, "on the stream of vLLM's thread"


def test_chunks_are_released_when_their_copies_have_ended(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    """Others may get their memory then."""

    class Overwritten(WrappedStore):
        def release(self, chunks: Any) -> bool:
            runtime.log.append("release")
            if runtime.log.count("release") == 2:
                for chunk in chunks:
                    chunk.memory.byte_array[:] = bytes(len(chunk.memory.byte_array))
            return self.inner.release(chunks)

    here = rank(wrap=Overwritten)
    here.fill(BLOCKS)
    runtime.log.clear()
    here.run(storing())
    plan = loading(OTHER_BLOCKS, 4, 24)
    here.side.begin_step(plan)
    here.side.begin_loads(plan)
    here.received()
    names = [line.split()[0] for line in runtime.log[runtime.log.index("release") :]]
    assert names == ["release", *["copy", "scatter"] * 3, *["wait"] * 3, "release"]
    assert runtime.copied_bytes[-3:] == runtime.copied_bytes[-6:-3], "chunks, and not parts of them"
    assert torch.equal(here.read(OTHER_BLOCKS)[:, 4:], here.read(BLOCKS)[:, 4:])
    assert (here.read(OTHER_BLOCKS)[:, :4] == POISON).all()


MORE_BLOCKS = (40, 42, 41, 44, 43, 45)


def begin_two_loads(here: Rank) -> None:
    """Of the same chunks into different blocks."""
    for name, blocks in (("first", OTHER_BLOCKS), ("second", MORE_BLOCKS)):
        plan = StepPlan((Load(name, 0, 24, (run_of(blocks),)),))
        here.side.begin_step(plan)
        here.side.begin_loads(plan)


class Counting(WrappedStore):
    """Counts chunks that it has given, and that were given back since. `is_dead`: as a sidecar that
    may have given their memory to others.
    """

    num_given = num_back = 0
    is_dead = False

    def get(self, *args: Any, **more: Any) -> Any:
        chunks = self.inner.get(*args, **more)
        self.num_given += len(chunks)
        return chunks

    def release(self, chunks: Any) -> bool:
        self.num_back += len(chunks)
        return self.inner.release(chunks) and not self.is_dead


@pytest.fixture
def counting(rank: Callable[..., Rank], hanging: cuda_streams.Runtime) -> tuple[Rank, Counting]:
    """A worker with three stored chunks, whose next copies hang."""
    hanging.is_moving.set()
    made: list[Counting] = []

    def wrap(store: ChunkStore) -> Counting:
        made.append(Counting(store))
        return made[0]

    here = rank(Shape(num_blocks=64), wrap=wrap)
    here.fill(BLOCKS)
    here.run(storing())
    made[0].num_given = made[0].num_back = 0
    hanging.is_moving.clear()
    return here, made[0]


def test_chunks_of_the_next_load_are_held_while_those_of_the_last_one_are_copied(
    counting: tuple[Rank, Counting], hanging: cuda_streams.Runtime
) -> None:
    here, store = counting
    begin_two_loads(here)
    wait_until(lambda: store.num_given == 6)
    assert here.side.take_received() == (set(), set())
    assert store.num_back == 0
    hanging.is_moving.set()
    here.side.wait_for_copies()
    assert here.side.take_received() == ({"first", "second"}, set())
    assert store.num_back == 6
    for blocks in (OTHER_BLOCKS, MORE_BLOCKS):
        assert torch.equal(here.read(blocks), here.read(BLOCKS))


def test_chunks_that_the_store_may_have_lost_while_they_waited_count_as_missing(
    counting: tuple[Rank, Counting], hanging: cuda_streams.Runtime
) -> None:
    """The sidecar died while another load was copied."""
    here, store = counting
    begin_two_loads(here)
    wait_until(lambda: store.num_given == 6)
    store.is_dead = True
    hanging.is_moving.set()
    here.side.wait_for_copies()
    assert here.side.take_received() == ({"first", "second"}, {"first", "second"})
    assert here.side.take_bad_blocks() == {*OTHER_BLOCKS, *MORE_BLOCKS}
    assert store.num_back == 6


def test_close_gives_back_what_a_load_that_waits_holds(
    counting: tuple[Rank, Counting],
    hanging: cuda_streams.Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if the one before it hangs, whose chunks may still be copied."""
    here, store = counting
    begin_two_loads(here)
    wait_until(lambda: store.num_given == 6)
    monkeypatch.setattr(worker_module, "JOIN_S", 0.01)
    here.side.close()
    assert store.num_back == 3
    hanging.is_moving.set()
    wait_until(lambda: store.num_back == 6)
    assert (here.read(MORE_BLOCKS) == POISON).all()


def test_failed_load_gives_back_the_chunks_of_all_its_groups(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = rank(Shape((FULL, window(24))), wrap=Counting)
    for group in (0, 1):
        here.fill(BLOCKS, group)
        here.run(storing(BLOCKS, group))

    def fail(*args: Any) -> Any:
        raise RuntimeError("no memory for slots")

    monkeypatch.setattr(PagedGPUConnector, "addresses_of", fail)
    runs = run_of(OTHER_BLOCKS), run_of(MORE_BLOCKS, 1)
    assert here.run(StepPlan((Load("r", 0, 24, runs),)))[3].failed == {"r": 0}
    assert here.counters.value(FAILED_CALLS_TOTAL) == 1


@LAYOUTS
def test_store_copies_what_the_step_has_computed(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime, layout: str, shape: Shape
) -> None:
    """On its own stream, after the step."""
    here = rank(shape, layout=layout)
    runtime.waited_by.clear()
    runtime.log.clear()
    runtime.compute.launch(lambda: here.fill(BLOCKS))
    here.run(storing())
    assert set(runtime.waited_by) == {"lmcache-commits"}
    assert "gather 0" not in runtime.log
    here.run(loading(OTHER_BLOCKS, 0, 24))
    assert torch.equal(here.read(OTHER_BLOCKS), here.read(BLOCKS))


def test_memory_for_copies_is_taken_before_vllm_serves_and_outside_its_pool(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    """Four buffers for all groups. A pool of vLLM's is that of the thread that it calls in."""
    here = rank(Shape((FULL, window(24))))
    num_taken = len(runtime.taken)
    kept = [thread for memory, thread in runtime.taken if memory() is not None]
    assert len(kept) == 4
    assert threading.current_thread().name not in kept
    for group in (0, 1):
        here.fill(BLOCKS, group)
        here.run(storing(BLOCKS, group))
    here.run(StepPlan((Load("r", 0, 24, (run_of(OTHER_BLOCKS), run_of(OTHER_BLOCKS, 1))),)))
    assert torch.equal(here.read(OTHER_BLOCKS), here.read(BLOCKS))
    assert here.counters.value(STORED_CHUNKS_TOTAL) == 6
    assert len(runtime.taken) == num_taken


def test_what_a_decoder_needs_is_taken_before_vllm_serves_and_outside_its_pool(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[Any, ...]] = []
    taken_by: list[str] = []

    class Decoder:
        def __init__(self, device: torch.device) -> None: ...

        def take_tables(self) -> None:
            taken_by.append(threading.current_thread().name)

    rank(PLAIN, layout="tokens")
    (size,) = {memory.nbytes for taken, _ in runtime.taken if (memory := taken()) is not None}
    runtime.taken.clear()
    monkeypatch.setattr(worker_module, "device_encodings", lambda device_type: ("encoded",))
    monkeypatch.setattr(worker_module, "decodes_rightly", lambda *kind: not tried.append(kind))
    monkeypatch.setattr(worker_module, "DeviceDecoder", Decoder)
    rank(PLAIN, layout="tokens")
    assert tried == [(cuda_streams.DEVICE, torch.float32, CHUNK_SIZE, 8)]
    assert taken_by
    assert threading.current_thread().name not in taken_by
    sizes = [memory.nbytes for taken, _ in runtime.taken if (memory := taken()) is not None]
    assert sizes == [size, size, 3 * size // 2, 3 * size // 2]


def test_groups_share_two_streams_for_each_direction(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    """With the check of vLLM's memory: CUDA has few, which vLLM's own may share. Loads go first."""
    here = rank(Shape((FULL, window(24))))
    for group in (0, 1):
        here.fill(BLOCKS, group)
        here.run(storing(BLOCKS, group))
    plan = StepPlan((Load("r", 0, 24, (run_of(OTHER_BLOCKS), run_of(OTHER_BLOCKS, 1))),))
    here.side.begin_step(plan)
    here.run(plan)
    used = {
        name: {int(line.split()[1]) for line in runtime.log if line.startswith(name)}
        for name in ("gather", "scatter")
    }
    priorities = {
        name: [runtime.streams[number].priority for number in numbers]
        for name, numbers in used.items()
    }
    assert priorities == {"gather": [0, 0], "scatter": [-1, -1]}
    assert len(runtime.streams) == 7, "with vLLM's, and one for each of two threads"


def test_a_device_without_room_for_copies_rests(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question would make torch wait for the device, and free what vLLM caches."""
    clock, canary = HeldClock(), worker_module.run_canary

    def checked(*args: Any) -> None:
        canary(*args)
        runtime.has_room = False  # vLLM has the rest

    other = rank()
    other.fill(BLOCKS)
    other.run(storing())
    monkeypatch.setattr(staging_module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(worker_module, "run_canary", checked)
    here = rank()
    for num_refused in (1, 2):
        for _ in range(2):
            here.run(storing())
            assert here.run(loading(OTHER_BLOCKS, 0, 24))[3].failed == {"r": 0}
        assert runtime.num_refused == num_refused
        clock.now_s += staging_module.REST_S
        if num_refused == 1:
            here.run(storing())
    assert here.counters.value(UNSTORED_CHUNKS_TOTAL) == 5 * 3
    assert here.counters.value(MISSED_CHUNKS_TOTAL, "unavailable") == 4 * 3
    assert here.counters.value(FAILED_CALLS_TOTAL) == 0
    runtime.has_room = True
    here.run(storing())
    here.run(loading(OTHER_BLOCKS, 0, 24))
    assert torch.equal(here.read(OTHER_BLOCKS), other.read(BLOCKS))


@pytest.fixture
def hanging(runtime: cuda_streams.Runtime) -> Iterator[cuda_streams.Runtime]:
    """No copy ends for a thread that waits for it, until the runtime is moving again."""
    runtime.is_moving.clear()
    yield runtime
    runtime.is_moving.set()


def overwrite(here: Rank, runtime: cuda_streams.Runtime) -> None:
    """The next forward pass, which the device runs at once."""
    runtime.compute.launch(lambda: here.fill(BLOCKS, base=1e6))
    runtime.compute.run(runtime.compute.num_launched)


def check_stored(here: Rank, runtime: cuda_streams.Runtime, kept: torch.Tensor) -> None:
    """Let copies end, and compare what was stored with what was in the blocks."""
    assert here.counters.value(STORED_CHUNKS_TOTAL) == 0, "copies have not ended"
    runtime.is_moving.set()
    here.side.wait_for_copies()
    assert here.counters.value(STORED_CHUNKS_TOTAL) == 3
    here.run(loading(OTHER_BLOCKS, 0, 24))
    assert torch.equal(here.read(OTHER_BLOCKS), kept)


@LAYOUTS
@pytest.mark.parametrize("is_told_late", [False, True])
def test_a_step_waits_on_the_device_for_reads_of_what_it_overwrites(
    rank: Callable[..., Rank],
    hanging: cuda_streams.Runtime,
    layout: str,
    shape: Shape,
    is_told_late: bool,
) -> None:
    """vLLM's thread waits for nothing. It hears of them before the step, or late, at its end."""
    hanging.is_moving.set()
    here = rank(shape, layout=layout, is_told_late=is_told_late)
    here.fill(BLOCKS)
    kept = here.read(BLOCKS)
    hanging.is_moving.clear()
    hanging.waited_by.clear()
    here.side.store(storing())
    if not is_told_late:
        here.side.before_overwriting(StepPlan(overwritten=frozenset({"r"})))
    overwrite(here, hanging)
    check_stored(here, hanging, kept)
    assert set(hanging.waited_by[:3]) == {"lmcache-commits"}


def test_a_step_beside_other_connectors_waits_for_reads_of_what_it_overwrites(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    """Their loads may not wait for vLLM's stream, and write at once."""
    here = rank(has_neighbours=True)
    here.fill(BLOCKS)
    kept = here.read(BLOCKS)
    here.side.store(storing())
    here.side.before_overwriting(StepPlan(overwritten=frozenset({"r"})))
    here.fill(BLOCKS, base=1e6)
    here.side.wait_for_copies()
    here.run(loading(OTHER_BLOCKS, 0, 24))
    assert torch.equal(here.read(OTHER_BLOCKS), kept)


def test_blocks_are_given_back_when_they_are_read(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    """Their copies to the host may still run."""
    here = rank()
    here.fill(BLOCKS)
    kept = here.read(BLOCKS)
    runtime.is_moving.clear()
    here.side.begin_loads(StepPlan(held=("r",)))
    here.side.store(storing())
    here.side.before_overwriting(StepPlan(overwritten=frozenset({"r"})))
    assert here.side.take_sent() == set()
    overwrite(here, runtime)  # after the reads
    assert here.side.take_sent() == {"r"}
    check_stored(here, runtime, kept)


def test_store_is_launched_while_copies_of_another_run(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    """As those of all groups are: what overwrites blocks waits for launches."""
    here = rank(Shape((FULL, window(24))))
    for group in (0, 1):
        here.fill(BLOCKS, group)
    runtime.is_moving.clear()
    runtime.log.clear()
    for blocks in (BLOCKS[:4], BLOCKS):
        here.side.store(StepPlan(stores=(Store("r", (run_of(blocks), run_of(blocks, 1))),)))
    wait_until(lambda: [line.split()[0] for line in runtime.log].count("gather") == 10)
    assert here.counters.value(STORED_CHUNKS_TOTAL) == 0
    runtime.is_moving.set()
    here.side.wait_for_copies()
    assert here.counters.value(UNSTORED_CHUNKS_TOTAL) == 0


def test_chunks_without_digests_are_published_when_their_copies_have_ended(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime
) -> None:
    class Unchecked(WrappedStore):
        needs_digests = False

        def put(self, chunks: Any) -> list[bool]:
            runtime.log.append("put")
            return self.inner.put(chunks)

    here = rank(wrap=Unchecked)
    here.fill(BLOCKS)
    runtime.log.clear()
    here.run(storing())
    names = [line.split()[0] for line in runtime.log]
    assert names == [*["gather", "copy"] * 3, *["wait"] * 3, "put"]


def test_addresses_are_kept_until_copies_have_ended(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory may be given to others by a stream that does not wait for the copies."""
    made: list[weakref.ref[Any]] = []
    addresses_of = PagedGPUConnector.addresses_of

    def noted(*args: Any) -> Any:
        addresses = addresses_of(*args)
        made.append(weakref.ref(addresses))
        return addresses

    here = rank()
    monkeypatch.setattr(PagedGPUConnector, "addresses_of", noted)
    runtime.is_moving.clear()
    here.side.store(storing())
    here.side.before_overwriting(StepPlan(overwritten=frozenset({"r"})))
    gc.collect()
    assert made[0]() is not None
    runtime.is_moving.set()


def test_slots_are_sent_to_the_device_on_a_stream_that_waits_for_no_step(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for these."""
    addresses_of, ended = PagedGPUConnector.addresses_of, list[str]()

    def sent(*args: Any) -> Any:
        stream = runtime.current()
        stream.run(stream.num_launched)
        return addresses_of(*args)

    here = rank()
    here.fill(BLOCKS)
    monkeypatch.setattr(PagedGPUConnector, "addresses_of", sent)
    runtime.is_moving.clear()
    runtime.compute.launch(lambda: ended.append("the step"))
    for blocks in (BLOCKS[:4], BLOCKS):
        here.side.store(storing(blocks))
        here.side.before_overwriting(StepPlan(overwritten=frozenset({"r"})))
    assert not ended
    runtime.is_moving.set()
    here.side.wait_for_copies()
    assert ended


class Logging(WrappedStore):
    """Notes when memory is given back."""

    def __init__(self, inner: ChunkStore, log: list[str]) -> None:
        super().__init__(inner)
        self._log = log

    def release(self, chunks: Any) -> bool:
        self._log.append("release")
        return self.inner.release(chunks)

    def abort(self, memories: Any) -> None:
        self._log.append(f"abort {len(memories)}")
        self.inner.abort(memories)


def fail_second(copy: Callable[..., None]) -> Callable[..., None]:
    def copy_one(connector: Any, memory: Any, start: int, end: int, **kwargs: Any) -> None:
        if start:
            raise RuntimeError("no memory for a launch")
        copy(connector, memory, start, end, **kwargs)

    return copy_one


def test_failed_load_waits_for_its_copies(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = rank(wrap=lambda store: Logging(store, runtime.log))
    here.fill(BLOCKS)
    here.run(storing())
    runtime.log.clear()
    monkeypatch.setattr(PagedGPUConnector, "to_gpu", fail_second(PagedGPUConnector.to_gpu))
    assert here.run(loading(OTHER_BLOCKS, 0, 24))[3].failed == {"r": 0}
    assert [line.split()[0] for line in runtime.log] == ["copy", "scatter", "wait", "release"]


def test_failed_store_waits_for_its_copies(
    rank: Callable[..., Rank], runtime: cuda_streams.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may get its memory then."""
    here = rank(wrap=lambda store: Logging(store, runtime.log))
    here.fill(BLOCKS)
    runtime.log.clear()
    monkeypatch.setattr(PagedGPUConnector, "from_gpu", fail_second(PagedGPUConnector.from_gpu))
    here.run(storing())
    assert runtime.log[-2:] == ["wait", "abort 3"]
    assert here.counters.value(FAILED_CALLS_TOTAL) == 1


@pytest.mark.parametrize("has_streams", [False, True])
def test_memory_of_the_store_is_pinned_for_the_device_of_vllms_memory(
    rank: Callable[..., Rank], request: pytest.FixtureRequest, has_streams: bool
) -> None:
    pinned_for = []

    class Pinning(WrappedStore):
        def pin_memory(self, device: torch.device) -> None:
            pinned_for.append(device)

    if has_streams:
        request.getfixturevalue("runtime")
    rank(wrap=Pinning)
    assert pinned_for == [cuda_streams.DEVICE] * has_streams


def test_worker_takes_part_while_the_store_is_full(rank: Callable[..., Rank]) -> None:
    class Full(RecordingStore):
        def reserve(self, keys: Any, shapes: Any, dtype: str) -> list[NotLent]:
            return [NotLent.NO_ROOM] * len(shapes)

    here = rank(wrap=Full)
    here.fill(BLOCKS)
    here.run(storing())
    assert here.run(storing())[3] is None


def test_step_is_reported_once_by_its_number(rank: Callable[..., Rank]) -> None:
    """Without it the scheduler never learns how fast the engine computes."""
    one = rank()
    assert one.run(StepPlan(step=7))[3].step == 7
    assert one.run(StepPlan())[3] is None
