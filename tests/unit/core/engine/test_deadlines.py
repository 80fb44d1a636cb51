"""Never slower than no cache: no retrieve waits longer than computing the KV would take, at the
rate that the engine learns. Reads: `tests/unit/core/storage/test_stack.py`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from lmcache_core.engine import engine as engine_module
from lmcache_core.engine.prefill_rate import (
    FALL,
    MAX_OPEN_PREFILLS,
    MAX_PREFILL_S,
    MIN_PREFILL_S,
    MIN_PREFILL_TOKENS,
    RISE,
    PrefillRate,
)
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend

from tests.fixtures.embedded import Embedded, embedded_engine, until
from tests.fixtures.held_clock import HeldClock
from tests.fixtures.kv import CHUNK_SIZE
from tests.fixtures.prompts import tokens_of
from tests.suites.faults import ForwardingBackend

TOKENS = tokens_of((0, 1, 0, 0))
NUM_CHUNKS = 4
NEVER_S = 3600.0
"""A limit that no test reaches."""


class Hanging(ForwardingBackend):
    """A tier that hangs, or blocks the event loop, on request."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self.hangs = False
        self.may_go_on: threading.Event | None = None

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().batched_contains(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        if self.hangs:
            await asyncio.Event().wait()
        results = await super().batched_get(keys, allocate, timeout_s)
        if self.may_go_on is not None:
            self.may_go_on.wait()
        return results


def hanging_engine(
    directory: Path, recompute_chunk_s: float, **options: object
) -> AbstractContextManager[Embedded]:
    rate = CHUNK_SIZE / recompute_chunk_s
    return embedded_engine(
        directory,
        wrap=Hanging,
        **({"prefill_tokens_per_s": rate, "tier_timeout_s": NEVER_S} | options),
    )


def hanging_tier(cache: Embedded) -> Hanging:
    tier = cache.lower(Hanging)
    assert isinstance(tier, Hanging)
    return tier


def store_cold(cache: Embedded, num_hot: int = 0) -> None:
    """Store all chunks on disk, and the first of them in memory too."""
    cache.store(TOKENS)
    cache.drain()
    cold = [ChunkKey.of(DEFAULT_TENANT, key) for key in cache.keys(TOKENS)[num_hot:]]
    cache.hot.remove_many(cold)


@pytest.mark.parametrize("num_hot", [0, 3])
def test_a_tier_that_hangs_is_waited_for_no_longer_than_computing_takes(
    tmp_path: Path, num_hot: int
) -> None:
    with hanging_engine(tmp_path, 0.05) as cache:
        store_cold(cache, num_hot)
        hanging_tier(cache).hangs = True
        assert cache.retrieve(TOKENS) == num_hot * CHUNK_SIZE
        assert cache.misses() == {"deadline": NUM_CHUNKS - num_hot}
        cache.check_nothing_held()


def test_a_tier_that_blocks_the_event_loop_is_a_miss_and_its_late_chunks_are_given_back(
    tmp_path: Path,
) -> None:
    with hanging_engine(tmp_path, 0.01) as cache:
        store_cold(cache)
        may_go_on = hanging_tier(cache).may_go_on = threading.Event()
        try:
            assert cache.retrieve(TOKENS) == 0
        finally:
            may_go_on.set()
        assert cache.misses() == {"unavailable": NUM_CHUNKS}


def test_hot_chunks_are_served_however_fast_the_engine_computes(tmp_path: Path) -> None:
    with hanging_engine(tmp_path, 1e-7) as cache:
        cache.store(TOKENS)
        assert cache.retrieve(TOKENS) == len(TOKENS)
        cache.forget_hot()
        assert cache.retrieve(TOKENS) == 0, "no disk is as fast"
        assert cache.misses() == {"deadline": NUM_CHUNKS}


def test_a_prefetch_may_take_longer_than_computing(tmp_path: Path) -> None:
    with hanging_engine(tmp_path, 1e-7) as cache:
        store_cold(cache)
        cache.engine.prefetch(TOKENS)
        until(lambda: cache.engine.lookup(TOKENS, ["Hot"]) == len(TOKENS), "it was not lifted")
        assert cache.retrieve(TOKENS) == len(TOKENS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    """The clock of prefills in engines."""
    made = HeldClock()
    monkeypatch.setattr(engine_module, "PrefillRate", functools.partial(PrefillRate, clock=made))
    return made


def limit_of_a_chunk(
    cache: Embedded, monkeypatch: pytest.MonkeyPatch, tokens: torch.Tensor = TOKENS
) -> float | None:
    """Retrieve; return how long the engine lets its store take for a chunk."""
    limits: list[float | None] = []
    get = cache.manager.get

    def noted(
        keys: Sequence[CacheEngineKey], recompute_s: float | None = None, **options: bool
    ) -> list[Chunk]:
        limits.append(recompute_s)
        return get(keys, recompute_s, **options)

    with monkeypatch.context() as patched:
        patched.setattr(cache.manager, "get", noted)
        cache.retrieve(tokens)
    return limits[0]


@pytest.mark.parametrize(
    ("num_stored", "num_tokens"), [(0, 64), (32, 64), (0, 64 + 5)], ids=["all", "rest", "unfull"]
)
def test_the_rate_is_learned_from_a_miss_and_the_store_that_follows(
    clock: HeldClock, monkeypatch: pytest.MonkeyPatch, num_stored: int, num_tokens: int
) -> None:
    """Also of a chunk that is not stored because it is not whole: it was computed all the same."""
    tokens = tokens_of((0, 1, 0, 0, 1))[:num_tokens]
    with embedded_engine(save_unfull_chunk=False) as cache:
        cache.store(tokens[:num_stored])
        assert limit_of_a_chunk(cache, monkeypatch, tokens) is None, "no miss came before"
        clock.now_s += 0.5
        cache.store(tokens)
        rate = (num_tokens - num_stored) / 0.5
        assert limit_of_a_chunk(cache, monkeypatch, tokens) == pytest.approx(CHUNK_SIZE / rate)


def test_an_integration_may_measure_the_rate_unless_it_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for options, rate in (({}, 2000.0), ({"prefill_tokens_per_s": 7.0}, 7.0)):
        with embedded_engine(**options) as cache:
            cache.engine.note_prefill(1000, 0.5)
            limit_s = limit_of_a_chunk(cache, monkeypatch)
            assert limit_s == pytest.approx(CHUNK_SIZE / rate)


def test_the_configured_limit_holds_where_computing_is_slow(tmp_path: Path) -> None:
    with hanging_engine(tmp_path, NEVER_S, tier_timeout_s=0.1) as cache:
        store_cold(cache)
        hanging_tier(cache).hangs = True
        assert cache.retrieve(TOKENS) == 0
        assert cache.engine.lookup(TOKENS) == 0


@pytest.fixture
def rate(clock: HeldClock) -> PrefillRate:
    return PrefillRate(clock=clock)


def test_the_last_miss_of_a_chunk_counts(rate: PrefillRate, clock: HeldClock) -> None:
    """The first request may have been aborted."""
    rate.missed("k")
    clock.now_s += 30.0
    rate.missed("k")
    clock.now_s += 0.1
    rate.stored("k", 100)
    assert rate.tokens_per_s == pytest.approx(1000)


@pytest.mark.parametrize(
    ("num_tokens", "elapsed_s"),
    [
        (MIN_PREFILL_TOKENS - 1, 1.0),
        (100, -1.0),
        (100, MIN_PREFILL_S / 2),
        (100, MAX_PREFILL_S + 1),
    ],
)
def test_impossible_measurements_are_ignored(
    rate: PrefillRate, num_tokens: int, elapsed_s: float
) -> None:
    rate.note(num_tokens, elapsed_s)
    assert rate.tokens_per_s is None


def test_a_faster_rate_is_adopted_sooner_than_a_slower_one(rate: PrefillRate) -> None:
    rate.note(1000, 1.0)
    rate.note(3000, 1.0)
    assert rate.tokens_per_s == pytest.approx(1000 + RISE * 2000)
    before = rate.tokens_per_s
    rate.note(100, 1.0)
    assert rate.tokens_per_s == pytest.approx(before + FALL * (100 - before))


def test_misses_without_a_store_are_bounded(rate: PrefillRate, clock: HeldClock) -> None:
    for number in range(MAX_OPEN_PREFILLS + 1):
        rate.missed(number)
    clock.now_s += 1.0
    rate.stored(0, 100)
    assert rate.tokens_per_s is None, "the oldest went"
    rate.stored(1, 100)
    assert rate.tokens_per_s == pytest.approx(100)


def test_only_a_store_after_a_miss_is_measured(rate: PrefillRate, clock: HeldClock) -> None:
    rate.missed("k")
    clock.now_s += 0.5
    rate.stored("other", 1000)
    assert rate.tokens_per_s is None
    rate.stored("k", 1000)
    known = rate.tokens_per_s
    clock.now_s += 7.0
    rate.stored("k", 1000)
    assert rate.tokens_per_s == known, "a miss counts once"
