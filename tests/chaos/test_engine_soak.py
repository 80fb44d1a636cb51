"""Threads on one engine whose memory and disk are far too small: whatever is retrieved is right,
and nothing leaks.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.layout import BLOCK_BYTES

from tests.fixtures.embedded import Embedded, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of
from tests.suites.faults import FaultPlan, FaultyBackend

NUM_STEPS = 600
NUM_THREADS = 5
ARENA_CHUNKS = 12
DISK_CHUNKS = 16
MAX_CHUNKS = 5
NUM_PIECES = 3
DISK_GB = DISK_CHUNKS * (CHUNK_BYTES + 2 * BLOCK_BYTES) / (1 << 30)
FAULTS = FaultPlan(
    0, delayed_calls=0.2, delay_s=0.02, failed_calls=0.05, lost_chunks=0.05, damaged_chunks=0.05
)


class Soaker:
    """The calls of one thread."""

    def __init__(self, cache: Embedded, seed: int) -> None:
        self._cache, self._engine = cache, cache.engine
        self._random = random.Random(seed)
        self.num_loaded = self.num_steps = 0

    def step(self) -> None:
        rng = self._random
        prompt = tuple(rng.randrange(NUM_PIECES) for _ in range(rng.randint(1, MAX_CHUNKS)))
        tokens = tokens_of(prompt, rng.choice([CHUNK_SIZE, CHUNK_SIZE, 5]))
        call = rng.randrange(10)
        if call < 4:
            self._engine.store(tokens, kvcaches=kv_of(tokens))
        elif call < 7:
            target = empty_kv(len(tokens))
            loaded = self._engine.retrieve(tokens, kvcaches=target)
            num = int(loaded.sum())
            assert loaded[:num].all(), "what is loaded is a prefix"
            assert_equal_prefix(target, kv_of(tokens), num)
            self.num_loaded += num
        elif call == 7:
            assert 0 <= self._engine.lookup(tokens) <= len(tokens)
        elif call == 8:
            self._engine.prefetch(tokens)
        else:
            self._cache.manager.evict(self._cache.keys(tokens)[-2:])
        self.num_steps += 1


class Soak:
    """Threads that work until the block ends, which raises the first failure of one."""

    def __init__(self, cache: Embedded, seed: int) -> None:
        print(f"seed {seed}")
        self.soakers = [Soaker(cache, seed + i) for i in range(NUM_THREADS)]
        self.faults: list[BaseException] = []
        self._is_over = threading.Event()

    def wait_for(self, num_steps: int) -> None:
        """Wait until so many steps were made, or one failed."""
        until(
            lambda: (
                sum(soaker.num_steps for soaker in self.soakers) >= num_steps or bool(self.faults)
            ),
            "the engine hangs",
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._work, args=(each,)) for each in self.soakers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
        if self.faults:
            raise self.faults[0]

    def _work(self, soaker: Soaker) -> None:
        try:
            while not self._is_over.is_set():
                soaker.step()
        except BaseException as exc:
            self.faults.append(exc)


@pytest.mark.parametrize(
    ("local_cpu", "is_faulty"),
    [(True, True), (False, False)],
    ids=["kept hot, faulty disk", "passing through, sound disk"],
)
def test_nothing_wrong_is_loaded_and_nothing_leaks(
    tmp_path: Path, local_cpu: bool, is_faulty: bool
) -> None:
    with embedded_engine(
        tmp_path,
        ARENA_CHUNKS,
        wrap=(lambda tier: FaultyBackend(tier, FAULTS)) if is_faulty else (lambda tier: tier),
        local_cpu=local_cpu,
        max_local_disk_size=DISK_GB,
    ) as cache:
        soak = Soak(cache, secrets.randbits(32))

        def is_enough() -> bool:
            figures = cache.engine.stats()
            full = ["disk", "memory"] if local_cpu else ["disk"]
            return (
                all(figures[tier]["evicted_chunks"] > 0 for tier in full)
                and sum(soaker.num_loaded for soaker in soak.soakers) > 0
            )

        with soak.running():
            soak.wait_for(NUM_STEPS)
            until(
                lambda: bool(soak.faults) or is_enough(), "a tier never ran full, or nothing loads"
            )
        until(lambda: cache.stack.num_pending_bytes == 0, "a write neither ends nor fails")
        cache.check_nothing_held()
        disk = cache.lower(DiskBackend)
        assert isinstance(disk, DiskBackend)
        disk.check_integrity()


@pytest.mark.parametrize("has_disk", [False, True])
def test_an_engine_closed_amid_calls_leaves_nothing(tmp_path: Path, has_disk: bool) -> None:
    for turn in range(2):
        with embedded_engine(
            tmp_path / str(turn) if has_disk else None, ARENA_CHUNKS, close_drain_s=0.1
        ) as cache:
            soak = Soak(cache, secrets.randbits(32))
            with soak.running():
                soak.wait_for(NUM_STEPS // 20)
                cache.engine.close()
                soak.wait_for(NUM_STEPS // 10)
