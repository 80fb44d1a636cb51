"""Never slower than no cache: a retrieve ends, at the latest, about when the KV would have been
computed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.guard import MIN_OBSERVATIONS, Guard
from lmcache_core.storage.manager import MARGIN_S
from lmcache_core.storage.stack import GRACE_S

from tests.fixtures.embedded import Embedded, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import kv_of, tokens_of
from tests.suites.faults import ForwardingBackend

TOKENS = tokens_of((0, 1, 0, 0))
NUM_CHUNKS = 4
NOISE_S = 10.0
"""What a machine that does other things may add."""
LONG_S = 30.0


class Moody(ForwardingBackend):
    """A tier that hangs, blocks everybody, or takes its time, when told; and counts its reads."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self.hangs = False
        self.may_go_on: threading.Event | None = None
        self.delay_s = 0.0
        self.num_reads = 0

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().batched_contains(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        self.num_reads += 1
        if self.hangs:
            await asyncio.Event().wait()
        results = await super().batched_get(keys, allocate, timeout_s)
        try:
            if self.may_go_on is not None:
                self.may_go_on.wait()
            await asyncio.sleep(self.delay_s)
        except BaseException:
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        return results


def moody_engine(
    directory: Path, recompute_chunk_s: float | None, **options: object
) -> AbstractContextManager[Embedded]:
    rate = None if recompute_chunk_s is None else CHUNK_SIZE / recompute_chunk_s
    return embedded_engine(
        directory,
        wrap=Moody,
        **({"prefill_tokens_per_s": rate, "tier_timeout_s": LONG_S} | options),
    )


def moody_of(cache: Embedded) -> Moody:
    tier = cache.lower(Moody)
    assert isinstance(tier, Moody)
    return tier


def retrieve(cache: Embedded, tokens: torch.Tensor = TOKENS) -> tuple[int, float]:
    """How many chunks came back, and how long that took."""
    target = empty_kv(len(tokens))
    begin = time.monotonic()
    num = int(cache.engine.retrieve(tokens, kvcaches=target).sum())
    took_s = time.monotonic() - begin
    assert_equal_prefix(target, kv_of(tokens), num)
    return num // CHUNK_SIZE, took_s


def store_cold(cache: Embedded, num_hot: int = 0) -> None:
    """All chunks on disk, the first of them hot too."""
    cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
    cache.drain()
    cache.hot.remove_many(
        [ChunkKey.of(DEFAULT_TENANT, key) for key in cache.keys(TOKENS)[num_hot:]]
    )


@pytest.mark.parametrize("num_hot", [0, 3])
def test_a_tier_that_hangs_costs_about_what_computing_costs(tmp_path: Path, num_hot: int) -> None:
    recompute_chunk_s = 0.05
    with moody_engine(tmp_path, recompute_chunk_s) as cache:
        store_cold(cache, num_hot)
        moody_of(cache).hangs = True
        num, took_s = retrieve(cache)
        assert num == num_hot
        limit_s = recompute_chunk_s * (NUM_CHUNKS - num_hot)
        assert limit_s - 0.01 < took_s < limit_s + GRACE_S + NOISE_S
        assert cache.misses() == {"deadline": NUM_CHUNKS - num_hot}
        cache.check_nothing_held()


def test_a_tier_that_blocks_the_event_loop_costs_little_more(tmp_path: Path) -> None:
    with moody_engine(tmp_path, 0.01) as cache:
        store_cold(cache)
        may_go_on = moody_of(cache).may_go_on = threading.Event()
        try:
            assert retrieve(cache)[0] == 0
        finally:
            may_go_on.set()
        assert cache.misses() == {"unavailable": NUM_CHUNKS}


def test_the_configured_limit_holds_where_computing_is_slow(tmp_path: Path) -> None:
    with moody_engine(tmp_path, 20.0, tier_timeout_s=0.1) as cache:
        store_cold(cache)
        moody_of(cache).hangs = True
        assert retrieve(cache)[1] < 0.1 + GRACE_S + NOISE_S
        begin = time.monotonic()
        assert cache.engine.lookup(TOKENS) == 0
        assert time.monotonic() - begin < 0.1 + MARGIN_S + NOISE_S


def test_what_is_hot_is_served_however_fast_the_engine_computes(tmp_path: Path) -> None:
    with moody_engine(tmp_path, 1e-7) as cache:
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        assert retrieve(cache)[0] == NUM_CHUNKS
        cache.forget_hot()
        assert retrieve(cache)[0] == 0, "and a disk cannot be as fast"
        assert cache.misses() == {"deadline": NUM_CHUNKS}
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        assert retrieve(cache)[0] == NUM_CHUNKS


def test_a_prefetch_is_not_hurried(tmp_path: Path) -> None:
    with moody_engine(tmp_path, 1e-7) as cache:
        store_cold(cache)
        moody_of(cache).delay_s = 0.05
        cache.engine.prefetch(TOKENS)
        until(lambda: cache.engine.lookup(TOKENS, ["Hot"]) == len(TOKENS), "it was not lifted")
        assert retrieve(cache)[0] == NUM_CHUNKS


def test_what_comes_in_time_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow file: the prefix in front of it is reused, and what came from behind it is hot
    for the next request.
    """
    may_open = threading.Event()
    opened = DiskFiles.open
    with moody_engine(tmp_path, 0.25) as cache:
        store_cold(cache)
        disk = cache.lower(DiskBackend)
        assert isinstance(disk, DiskBackend)
        stuck = disk._layout.record(ChunkKey.of(DEFAULT_TENANT, cache.keys(TOKENS)[2]))

        def slow(self: DiskFiles, path: Path) -> int:
            assert path != stuck or may_open.wait(LONG_S)
            return opened(self, path)

        monkeypatch.setattr(DiskFiles, "open", slow)
        num, took_s = retrieve(cache)
        assert num == 2
        assert took_s < 0.25 * NUM_CHUNKS + GRACE_S + NOISE_S
        assert cache.misses() == {"deadline": 2}
        assert cache.engine.lookup(TOKENS, ["Hot"]) == 2 * CHUNK_SIZE
        may_open.set()
        cache.check_nothing_held()
        assert retrieve(cache)[0] == NUM_CHUNKS


def test_a_tier_slower_than_computing_is_soon_not_waited_for(tmp_path: Path) -> None:
    with embedded_engine(
        tmp_path, prefill_tokens_per_s=CHUNK_SIZE / 0.01, tier_timeout_s=LONG_S
    ) as cache:
        store_cold(cache)
        (priced,) = cache.stack.lower
        assert isinstance(priced, Guard)
        moody = priced._backend = Moody(priced.wrapped)
        moody.delay_s = LONG_S
        for _ in range(MIN_OBSERVATIONS):
            retrieve(cache)
        asked = moody.num_reads
        for _ in range(10):
            retrieve(cache)
        assert moody.num_reads <= asked + 1


def test_the_rate_is_learned_from_a_miss_and_the_store_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moody_engine(tmp_path, None) as cache:
        limits: list[float | None] = []
        get = cache.manager.get

        def noted(
            keys: Sequence[CacheEngineKey], recompute_s: float | None = None, **options: bool
        ) -> list[Chunk]:
            limits.append(recompute_s)
            return get(keys, recompute_s, **options)

        monkeypatch.setattr(cache.manager, "get", noted)
        assert retrieve(cache)[0] == 0
        time.sleep(0.1)
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        rate = cache.engine._prefill.tokens_per_s
        assert rate is not None
        assert len(TOKENS) / (0.1 + NOISE_S) < rate <= len(TOKENS) / 0.1
        assert retrieve(cache)[0] == NUM_CHUNKS
        assert limits == [None, pytest.approx(CHUNK_SIZE / rate)]


def test_a_store_that_goes_on_behind_a_reused_prefix_teaches_too(tmp_path: Path) -> None:
    with moody_engine(tmp_path, None) as cache:
        cache.engine.store(TOKENS[: 2 * CHUNK_SIZE], kvcaches=kv_of(TOKENS))
        assert cache.engine._prefill.tokens_per_s is None, "no miss came before"
        assert retrieve(cache)[0] == 2
        time.sleep(0.1)
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        rate = cache.engine._prefill.tokens_per_s
        assert rate is not None
        assert rate <= 2 * CHUNK_SIZE / 0.1


def test_an_integration_may_say_how_long_it_took() -> None:
    with embedded_engine() as cache:
        cache.engine.note_prefill(1000, 0.5)
        assert cache.engine._prefill.tokens_per_s == pytest.approx(2000)
    with embedded_engine(prefill_tokens_per_s=7.0) as cache:
        cache.engine.note_prefill(1000, 0.5)
        assert cache.engine._prefill.tokens_per_s == 7.0
