"""Never slower than no cache: no retrieve waits longer than computing the KV would take. How long
reads may take: `tests/unit/core/storage/test_stack.py`.
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
from lmcache_core.engine.prefill_rate import PrefillRate
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend

from tests.fixtures.embedded import Embedded, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import kv_of, tokens_of
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


def retrieve(cache: Embedded, tokens: torch.Tensor = TOKENS) -> int:
    """Return how many chunks came back."""
    target = empty_kv(len(tokens))
    num = int(cache.engine.retrieve(tokens, kvcaches=target).sum())
    assert_equal_prefix(target, kv_of(tokens), num)
    return num // CHUNK_SIZE


def store_cold(cache: Embedded, num_hot: int = 0) -> None:
    """Store all chunks on disk, and the first of them in memory too."""
    cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
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
        assert retrieve(cache) == num_hot
        assert cache.misses() == {"deadline": NUM_CHUNKS - num_hot}
        cache.check_nothing_held()


def test_a_tier_that_blocks_the_event_loop_is_a_miss_and_its_late_chunks_are_given_back(
    tmp_path: Path,
) -> None:
    with hanging_engine(tmp_path, 0.01) as cache:
        store_cold(cache)
        may_go_on = hanging_tier(cache).may_go_on = threading.Event()
        try:
            assert retrieve(cache) == 0
        finally:
            may_go_on.set()
        assert cache.misses() == {"unavailable": NUM_CHUNKS}


def test_hot_chunks_are_served_however_fast_the_engine_computes(tmp_path: Path) -> None:
    with hanging_engine(tmp_path, 1e-7) as cache:
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        assert retrieve(cache) == NUM_CHUNKS
        cache.forget_hot()
        assert retrieve(cache) == 0, "no disk is as fast"
        assert cache.misses() == {"deadline": NUM_CHUNKS}


def test_a_prefetch_may_take_longer_than_computing(tmp_path: Path) -> None:
    with hanging_engine(tmp_path, 1e-7) as cache:
        store_cold(cache)
        cache.engine.prefetch(TOKENS)
        until(lambda: cache.engine.lookup(TOKENS, ["Hot"]) == len(TOKENS), "it was not lifted")
        assert retrieve(cache) == NUM_CHUNKS


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of prefills in engines."""
    made = Clock()
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
        retrieve(cache, tokens)
    return limits[0]


@pytest.mark.parametrize(
    ("num_stored", "num_tokens"), [(0, 64), (32, 64), (0, 64 + 5)], ids=["all", "rest", "unfull"]
)
def test_the_rate_is_learned_from_a_miss_and_the_store_that_follows(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, num_stored: int, num_tokens: int
) -> None:
    """Also of a chunk that is not stored because it is not whole: it was computed all the same."""
    tokens = tokens_of((0, 1, 0, 0, 1))[:num_tokens]
    with embedded_engine(save_unfull_chunk=False) as cache:
        cache.engine.store(tokens[:num_stored], kvcaches=kv_of(tokens))
        assert limit_of_a_chunk(cache, monkeypatch, tokens) is None, "no miss came before"
        clock.now += 0.5
        cache.engine.store(tokens, kvcaches=kv_of(tokens))
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
        assert retrieve(cache) == 0
        assert cache.engine.lookup(TOKENS) == 0
