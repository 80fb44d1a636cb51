"""Threads on one engine whose memory and disk are far too small: whatever is retrieved is right,
and nothing leaks.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from pathlib import Path

import pytest
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.layout import BLOCK_BYTES
from lmcache_core.testing.faults import FaultPlan, FaultyBackend

from tests.fixtures.embedded import Embedded, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of

SOAK_S = 1.5
NUM_THREADS = 5
ARENA_CHUNKS = 12
DISK_CHUNKS = 20
MAX_CHUNKS = 5
NUM_PIECES = 3
DISK_GB = DISK_CHUNKS * (CHUNK_BYTES + 2 * BLOCK_BYTES) / (1 << 30)
FAULTS = FaultPlan(
    0, delayed_calls=0.2, delay_s=0.02, failed_calls=0.05, lost_chunks=0.05, damaged_chunks=0.05
)


class Soaker:
    """One thread's calls, until told to stop."""

    def __init__(self, cache: Embedded, seed: int) -> None:
        self._cache, self._engine = cache, cache.engine
        self._random = random.Random(seed)
        self.num_loaded = 0

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


def soak(cache: Embedded, seed: int, closes_amid: bool = False) -> int:
    """Let threads work for `SOAK_S` seconds; how many tokens they have loaded."""
    stop, faults = threading.Event(), list[BaseException]()
    soakers = [Soaker(cache, seed + i) for i in range(NUM_THREADS)]

    def work(soaker: Soaker) -> None:
        try:
            while not stop.is_set():
                soaker.step()
        except BaseException as exc:
            faults.append(exc)
            stop.set()

    threads = [threading.Thread(target=work, args=(soaker,)) for soaker in soakers]
    for thread in threads:
        thread.start()
    if closes_amid:
        time.sleep(SOAK_S / 5)
        cache.engine.close()
        time.sleep(SOAK_S / 50)
    stop.wait(SOAK_S if not closes_amid else 0)
    stop.set()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return sum(soaker.num_loaded for soaker in soakers)


@pytest.mark.parametrize("local_cpu", [True, False], ids=["kept hot", "passing through"])
@pytest.mark.parametrize("is_faulty", [False, True], ids=["sound disk", "faulty disk"])
def test_nothing_wrong_is_loaded_and_nothing_leaks(
    tmp_path: Path, local_cpu: bool, is_faulty: bool
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    with embedded_engine(
        tmp_path,
        ARENA_CHUNKS,
        wrap=(lambda tier: FaultyBackend(tier, FAULTS)) if is_faulty else (lambda tier: tier),
        local_cpu=local_cpu,
        max_local_disk_size=DISK_GB,
    ) as cache:
        assert soak(cache, seed) > 0
        until(lambda: cache.stack.num_pending_bytes == 0, "a write neither ends nor fails")
        cache.check_nothing_held()
        figures = cache.engine.stats()
        assert figures["LocalDiskBackend"]["evicted_chunks"] > 0, "the disk was never full"
        assert not local_cpu or figures["Hot"]["evicted_chunks"] > 0, "memory was never full"
        disk = cache.lower(DiskBackend)
        assert isinstance(disk, DiskBackend)
        disk.check_integrity()


@pytest.mark.parametrize("has_disk", [False, True])
def test_an_engine_closed_amid_calls_leaves_nothing(tmp_path: Path, has_disk: bool) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    for turn in range(4):
        with embedded_engine(
            tmp_path / str(turn) if has_disk else None, ARENA_CHUNKS, close_drain_s=0.1
        ) as cache:
            soak(cache, seed + turn, closes_amid=True)
