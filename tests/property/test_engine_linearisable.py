"""Many threads, one engine: what each of them sees of a chunk can be explained by some order of all
that was done to it.

Every call is entered, with its begin and its end, into the history of each chunk that it touches; a
prefetch changes nothing. Whatever is retrieved is compared with the KV of exactly those tokens as
it arrives, so that a history is about presence alone. There is room for all
chunks: a chunk is absent because it was evicted or never stored, or not at all.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, MissReason, Result
from lmcache_core.storage.base import StorageBackend

from tests.fixtures.embedded import PATIENT, Embedded, embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import Prompt, kv_of, tokens_of, wanted_pieces
from tests.fixtures.register_history import Action, History, Operation, num_explained
from tests.suites.faults import ForwardingBackend

NUM_THREADS = 4
NUM_STEPS = 400
MAX_CHUNKS = 3
MAX_LINGER_S = 0.003
ABSENT_REASONS = {MissReason.NEVER_STORED.value, MissReason.EVICTED.value}
PLACES = {
    "hot": {"has_disk": False, "local_cpu": True},
    "hot and disk": {"has_disk": True, "local_cpu": True},
    "disk": {"has_disk": True, "local_cpu": False},
}

Step = tuple[str, Prompt, int]
"""Call, prompt, length of its last chunk."""
CALLS = ("store", "retrieve", "retrieve", "lookup", "lookup", "evict", "prefetch")
LAST_LENGTHS = (CHUNK_SIZE, CHUNK_SIZE, CHUNK_SIZE - 1)
STEPS = st.tuples(
    st.sampled_from(CALLS),
    st.lists(st.integers(0, 1), min_size=1, max_size=MAX_CHUNKS).map(tuple),
    st.sampled_from(LAST_LENGTHS),
)
PROGRAMS = st.lists(st.lists(STEPS, min_size=1, max_size=12), min_size=2, max_size=NUM_THREADS)


class Lingering(ForwardingBackend):
    """A tier that takes its time before it begins and before it answers, so that others come in
    between.
    """

    def __init__(self, backend: StorageBackend, seed: int) -> None:
        super().__init__(backend)
        self._random = random.Random(seed)

    async def linger(self) -> None:
        if self._random.random() < 0.7:
            await asyncio.sleep(self._random.random() * MAX_LINGER_S)  # real time: a slow tier

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self.linger()
        found = await super().batched_contains(keys)
        await self.linger()
        return found

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        await self.linger()
        results = await super().batched_get(keys, allocate, timeout_s)
        try:
            await self.linger()
        except BaseException:
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await self.linger()
        kept = await super().batched_put(chunks)
        await self.linger()
        return kept

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        await self.linger()
        num_removed = await super().batched_remove(keys)
        await self.linger()
        return num_removed


class Callers:
    """Does steps of programs, and enters them into a history."""

    def __init__(self, cache: Embedded, keeps_hot: bool) -> None:
        self.history = History()
        self._cache = cache
        self._engine = cache.engine
        self._keeps_hot = keeps_hot
        self._calls: dict[str, Callable[[torch.Tensor], None]] = {
            "store": self.store,
            "retrieve": self.retrieve,
            "lookup": self.lookup,
            "evict": self.evict,
            "prefetch": self._engine.prefetch,
        }

    def run(self, program: Sequence[Step]) -> None:
        for call, prompt, last in program:
            self._calls[call](tokens_of(prompt, last))

    def store(self, tokens: torch.Tensor) -> None:
        with self.history.operation() as done:
            self._engine.store(tokens, kvcaches=kv_of(tokens))
            if not self._keeps_hot:
                # where nothing is kept hot, a chunk is there when it has been written
                self._cache.drain()
            done.update(dict.fromkeys(wanted_pieces(tokens), Action.STORED))

    def retrieve(self, tokens: torch.Tensor) -> None:
        target = empty_kv(len(tokens))
        with self.history.operation() as done:
            loaded = self._engine.retrieve(tokens, kvcaches=target)
            done.update(seen_prefix(tokens, int(loaded.sum())))
        assert_equal_prefix(target, kv_of(tokens), int(loaded.sum()))

    def lookup(self, tokens: torch.Tensor) -> None:
        with self.history.operation() as done:
            done.update(seen_prefix(tokens, self._engine.lookup(tokens)))

    def evict(self, tokens: torch.Tensor) -> None:
        with self.history.operation() as done:
            self._cache.manager.evict(self._cache.keys(tokens)[-1:])
            done[wanted_pieces(tokens)[-1]] = Action.EVICTED


def seen_prefix(tokens: torch.Tensor, num_tokens: int) -> dict[tuple[int, ...], Action]:
    """What a prefix of that length says: its chunks are there, the next one is not; of
    those after that one it says nothing.
    """
    pieces = wanted_pieces(tokens)
    num = sum(len(piece) <= num_tokens for piece in pieces)
    return dict.fromkeys(pieces[:num], Action.SEEN) | dict.fromkeys(
        pieces[num : num + 1], Action.NOT_SEEN
    )


def run_together(
    programs: Sequence[Sequence[Step]], place: str, directory: Path, seed: int
) -> Callers:
    has_disk, local_cpu = PLACES[place]["has_disk"], PLACES[place]["local_cpu"]
    faults: list[BaseException] = []
    with embedded_engine(
        directory if has_disk else None,
        wrap=lambda tier: Lingering(tier, seed),
        local_cpu=local_cpu,
        close_drain_s=0.0,
        **PATIENT,
    ) as cache:
        callers = Callers(cache, local_cpu)
        barrier = threading.Barrier(len(programs))

        def work(program: Sequence[Step]) -> None:
            try:
                barrier.wait()
                callers.run(program)
            except BaseException as exc:
                faults.append(exc)

        threads = [threading.Thread(target=work, args=(program,)) for program in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        assert set(cache.misses()) <= ABSENT_REASONS
        if has_disk:
            assert cache.engine.stats()["disk"]["dropped_writes"] == 0
    callers.history.check()
    return callers


def random_program(rng: random.Random) -> list[Step]:
    return [
        (
            rng.choice(CALLS),
            tuple(rng.randrange(2) for _ in range(rng.randint(1, MAX_CHUNKS))),
            rng.choice(LAST_LENGTHS),
        )
        for _ in range(NUM_STEPS)
    ]


@pytest.mark.parametrize("place", PLACES)
def test_long_random_histories_are_linearisable(place: str, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    callers = run_together([random_program(rng) for _ in range(NUM_THREADS)], place, tmp_path, seed)
    assert callers.history.num_operations > NUM_THREADS * NUM_STEPS / 2


@pytest.mark.parametrize("place", PLACES)
def test_chosen_programs_are_linearisable(
    place: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Threads do not meet the same way twice: a program that fails is shown as it is, not made
    # smaller.
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(programs=PROGRAMS, seed=st.integers(0, 2**32 - 1))
    def check(programs: list[list[Step]], seed: int) -> None:
        note(f"seed {seed}")
        run_together(programs, place, tmp_path_factory.mktemp("disk"), seed)

    check()


STORED, EVICTED, SEEN, NOT_SEEN = Action


@pytest.mark.parametrize(
    ("operations", "is_linearisable"),
    [
        pytest.param(
            [(NOT_SEEN, 0, 1), (STORED, 2, 3), (SEEN, 4, 5), (EVICTED, 6, 7), (NOT_SEEN, 8, 9)],
            True,
            id="one after the other",
        ),
        pytest.param([(SEEN, 0, 1)], False, id="never stored"),
        pytest.param([(STORED, 0, 1), (NOT_SEEN, 2, 3)], False, id="lost"),
        pytest.param([(STORED, 0, 1), (EVICTED, 2, 3), (SEEN, 4, 5)], False, id="came back"),
        pytest.param(
            [(STORED, 0, 10), (EVICTED, 1, 9), (NOT_SEEN, 11, 12), (SEEN, 13, 14)],
            False,
            id="came back later",
        ),
        pytest.param(
            [(STORED, 0, 10), (EVICTED, 1, 9), (SEEN, 2, 3), (NOT_SEEN, 11, 12)],
            True,
            id="store first",
        ),
        pytest.param([(STORED, 0, 10), (EVICTED, 1, 9), (SEEN, 11, 12)], True, id="evict first"),
        pytest.param(
            [(STORED, 0, 10), (SEEN, 1, 2), (NOT_SEEN, 3, 4)],
            False,
            id="seen and lost while it is stored",
        ),
        pytest.param(
            [(STORED, 0, 9), (NOT_SEEN, 1, 10), (SEEN, 2, 3)], True, id="a long read begins before"
        ),
    ],
)
def test_the_judge_is_right(
    operations: list[tuple[Action, int, int]], is_linearisable: bool
) -> None:
    ordered = [Operation(*operation) for operation in operations]
    assert (num_explained(ordered) == len(ordered)) == is_linearisable
