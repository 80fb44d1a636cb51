"""The engine with tiers of its own."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache_core.engine.prefill_rate import PrefillRate
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import DEFAULT_TENANT, ChunkKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL, STORED_CHUNKS_TOTAL
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan

from tests.fixtures.embedded import embedded_engine, until
from tests.fixtures.kv import (
    CHUNK_SIZE,
    HIDDEN,
    NUM_LAYERS,
    assert_equal_prefix,
    empty_kv,
    make_config,
    make_metadata,
    random_kv,
    tokens_of,
)


def build(
    config: LMCacheEngineConfig, allocator: HostMemoryAllocator, **metadata: object
) -> LMCacheEngine:
    described = make_metadata(**metadata)
    database = ChunkedTokenDatabase(config, described)
    return LMCacheEngine(
        config, described, allocator, database, VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    )


@pytest.fixture
def allocator() -> Iterator[HostMemoryAllocator]:
    made = HostMemoryAllocator(8 << 20)
    yield made
    made.check_integrity()
    assert made.used_bytes == 0


@pytest.fixture
def engine(allocator: HostMemoryAllocator) -> Iterator[LMCacheEngine]:
    made = build(make_config(), allocator)
    made.open()
    yield made
    made.close()


@pytest.mark.parametrize("num_tokens", [1, CHUNK_SIZE - 1, CHUNK_SIZE, 2 * CHUNK_SIZE + 3])
@pytest.mark.parametrize("save_unfull_chunk", [True, False])
def test_a_partial_chunk_is_stored_only_where_it_is_wanted(
    allocator: HostMemoryAllocator, save_unfull_chunk: bool, num_tokens: int
) -> None:
    engine = build(make_config(save_unfull_chunk=save_unfull_chunk), allocator)
    engine.open()
    tokens, kv, target = tokens_of(num_tokens), random_kv(num_tokens), empty_kv(num_tokens)
    num_kept = num_tokens if save_unfull_chunk else num_tokens // CHUNK_SIZE * CHUNK_SIZE
    for _ in range(2):
        engine.store(tokens, kvcaches=kv)
        assert engine.counters.value(STORED_CHUNKS_TOTAL) == math.ceil(num_kept / CHUNK_SIZE)
        assert engine.lookup(tokens) == num_kept
    assert int(engine.retrieve(tokens, kvcaches=target).sum()) == num_kept
    assert_equal_prefix(target, kv, num_kept)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[:1] = False
    with pytest.raises(ValueError, match="multiple of the chunk size"):
        engine.store(tokens, mask, kvcaches=kv)
    engine.close()


def test_what_is_left_out_of_a_store_was_computed_all_the_same(
    allocator: HostMemoryAllocator,
) -> None:
    engine = build(make_config(save_unfull_chunk=False), allocator)
    now_s = iter((10.0, 11.0))
    engine._prefill = PrefillRate(clock=lambda: next(now_s))
    engine.open()
    num_tokens = 4 * CHUNK_SIZE + 5
    engine.retrieve(tokens_of(num_tokens), kvcaches=empty_kv(num_tokens))
    engine.store(tokens_of(num_tokens), kvcaches=random_kv(num_tokens))
    assert engine._prefill.tokens_per_s == pytest.approx(num_tokens)
    engine.close()


@pytest.mark.parametrize("num_false", [1, CHUNK_SIZE - 1, CHUNK_SIZE + 1])
def test_a_mask_off_the_chunk_grid_is_refused(engine: LMCacheEngine, num_false: int) -> None:
    mask = torch.ones(4 * CHUNK_SIZE, dtype=torch.bool)
    mask[:num_false] = False
    with pytest.raises(ValueError, match="multiple of the chunk size"):
        engine.retrieve(tokens_of(4 * CHUNK_SIZE), mask, kvcaches=empty_kv(4 * CHUNK_SIZE))


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "org/other"},
        {"revision": "v2"},
        {"adapter": "lora@1"},
        {"kv_dtype": torch.bfloat16},
        {"layout": "packed"},
        {"worker_id": 1, "world_size": 2},
    ],
)
def test_other_kv_is_never_served(allocator: HostMemoryAllocator, other: dict[str, object]) -> None:
    """Two engines over one allocator and one set of tiers would share nothing either: their keys
    differ.
    """
    tokens = tokens_of(3 * CHUNK_SIZE)
    config = make_config()
    keys = {
        key for _, _, key in ChunkedTokenDatabase(config, make_metadata()).process_tokens(tokens)
    }
    others = {
        key
        for _, _, key in ChunkedTokenDatabase(config, make_metadata(**other)).process_tokens(tokens)
    }
    assert not keys & others
    assert len(others) == 3


def test_equal_placeholders_of_other_images_share_nothing(engine: LMCacheEngine) -> None:
    """Turn 1 has an image in chunk 1; the same tokens with another image share chunk 0 alone, a
    new image in turn 2 keeps turn 1.
    """
    n = 4 * CHUNK_SIZE
    tokens, kv = tokens_of(n), random_kv(n)
    cat, dog = (MultimodalSpan(name, CHUNK_SIZE + 2, 5) for name in (b"cat", b"dog"))
    engine.store(tokens, spans=[cat], kvcaches=kv)
    assert engine.lookup(tokens, spans=[cat]) == n
    assert engine.lookup(tokens, spans=[dog]) == engine.lookup(tokens) == CHUNK_SIZE
    target = empty_kv(n)
    assert int(engine.retrieve(tokens, spans=[dog], kvcaches=target).sum()) == CHUNK_SIZE
    assert_equal_prefix(target, kv, CHUNK_SIZE)
    later = MultimodalSpan(b"bird", 3 * CHUNK_SIZE, 4)
    assert engine.lookup(tokens, spans=[cat, later]) == 3 * CHUNK_SIZE


@pytest.mark.parametrize("name", [b"kv", b"kv \xff"])
def test_disk_serves_after_a_restart(
    allocator: HostMemoryAllocator, tmp_path: Path, name: bytes
) -> None:
    config = make_config(local_disk=str(tmp_path / os.fsdecode(name)), max_local_disk_size=0.01)
    tokens, kv = tokens_of(4 * CHUNK_SIZE + 5), random_kv(4 * CHUNK_SIZE + 5)
    first = build(config, allocator)
    first.open()
    first.store(tokens, kvcaches=kv)
    first.close()
    second = build(config, allocator)
    second.open()
    assert second.lookup(tokens, ["Hot"]) == 0
    assert second.lookup(tokens, ["LocalDiskBackend"]) == len(tokens)
    target = empty_kv(len(tokens))
    assert second.retrieve(tokens, kvcaches=target).all()
    assert_equal_prefix(target, kv, len(tokens))
    assert second.counters.value(RETRIEVED_TOKENS_TOTAL, "disk") == len(tokens)
    assert second.lookup(tokens, ["Hot"]) == len(tokens), "what came from disk is hot now"
    second.close()
    assert os.listdir(os.fsencode(tmp_path)) == [name]  # noqa: PTH208 -- pathlib has no names in bytes


def test_a_lookup_on_disk_waits_for_no_event_loop(tmp_path: Path) -> None:
    with embedded_engine(tmp_path) as cache:
        tokens = tokens_of(4 * CHUNK_SIZE)
        cache.engine.store(tokens, kvcaches=random_kv(len(tokens)))
        until(lambda: cache.engine.lookup(tokens, ["LocalDiskBackend"]) == len(tokens))
        busy, go = threading.Event(), threading.Event()

        async def block() -> None:
            busy.set()
            go.wait(60)

        blocked = cache.manager._loop.submit(block())
        assert busy.wait(60)
        try:
            assert cache.engine.lookup(tokens, ["LocalDiskBackend"]) == len(tokens)
            assert cache.engine.lookup(tokens_of(4 * CHUNK_SIZE, 9)) == 0
        finally:
            go.set()
            blocked.result(60)


def test_a_lookup_joins_what_each_tier_has(tmp_path: Path) -> None:
    """Host memory has the second and third chunk, the disk the first, a remote the fourth."""
    remote = tmp_path / "remote"
    remote.mkdir()
    with embedded_engine(tmp_path / "kv", remote_url=f"file://{remote}") as cache:
        tokens = tokens_of(4 * CHUNK_SIZE)
        cache.engine.store(tokens, kvcaches=random_kv(len(tokens)))
        manager = cache.manager
        places = {"memory": [1, 2], "disk": [0], "storage": [3]}
        keys = [key for _, _, key in cache.engine._named(tokens, None, ())]
        for tier in (manager._hot, *manager._tiers.lower):
            until(lambda name=tier.name: cache.engine.lookup(tokens, [name]) == len(tokens))
            others = [
                ChunkKey.of(DEFAULT_TENANT, keys[i]) for i in range(4) if i not in places[tier.name]
            ]
            manager._loop.run(tier.batched_remove(others), 60)
        assert cache.engine.lookup(tokens) == len(tokens)
        assert cache.engine.lookup(tokens, ["Hot", "LocalDiskBackend"]) == 3 * CHUNK_SIZE
        assert cache.engine.lookup(tokens, ["LocalDiskBackend"]) == CHUNK_SIZE


def test_threads_share_an_engine(engine: LMCacheEngine) -> None:
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        all_tokens, all_kv = (
            tokens_of(4 * CHUNK_SIZE, seed % 3),
            random_kv(4 * CHUNK_SIZE, seed % 3),
        )
        try:
            for turn in range(10):
                n = (turn % 4 + 1) * CHUNK_SIZE
                tokens, kv, target = (
                    all_tokens[:n],
                    tuple((k[:n], v[:n]) for k, v in all_kv),
                    empty_kv(n),
                )
                engine.store(tokens, kvcaches=kv)
                assert engine.retrieve(tokens, kvcaches=target).all()
                assert_equal_prefix(target, kv, n)
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_the_builder_keeps_one_engine_a_name() -> None:
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    try:
        first = LMCacheEngineBuilder.get_or_create("one", make_config(), make_metadata(), connector)
        assert (
            LMCacheEngineBuilder.get_or_create("one", make_config(), make_metadata(), connector)
            is first
        )
        assert LMCacheEngineBuilder.get("one") is first
        with pytest.raises(ValueError, match="another configuration"):
            LMCacheEngineBuilder.get_or_create(
                "one", make_config(chunk_size=32), make_metadata(), connector
            )
    finally:
        LMCacheEngineBuilder.destroy("one")
    assert LMCacheEngineBuilder.get("one") is None
    LMCacheEngineBuilder.destroy("one")


def test_leaving_the_block_closes_an_engine_and_its_id_makes_another_one() -> None:
    arguments = make_config(), make_metadata(), VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    tokens, kv = tokens_of(32), random_kv(32)
    with LMCacheEngineBuilder.get_or_create("one", *arguments) as first:
        first.store(tokens, kvcaches=kv)
        assert first.lookup(tokens) == 32
    first.close()
    assert first.lookup(tokens) == 0
    assert LMCacheEngineBuilder.get("one") is None
    with LMCacheEngineBuilder.get_or_create("one", *arguments) as second:
        assert second is not first
        first.close()
        assert LMCacheEngineBuilder.get("one") is second, "only its own id is given up"
    LMCacheEngineBuilder.destroy("one")


def test_entering_the_block_opens_an_engine() -> None:
    config, metadata = make_config(), make_metadata()
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    database = ChunkedTokenDatabase(config, metadata)
    tokens = tokens_of(32)
    engine = LMCacheEngine(config, metadata, HostMemoryAllocator(1 << 20), database, connector)
    for _ in range(2):
        with engine as opened:
            assert opened is engine
            assert engine.lookup(tokens) == 0
            engine.store(tokens, kvcaches=random_kv(32))
            assert engine.lookup(tokens) == 32


def test_an_engine_with_a_disk_may_be_opened_again(tmp_path: Path) -> None:
    config, metadata = (
        make_config(local_disk=f"file://{tmp_path}/", max_local_disk_size=0.01),
        make_metadata(),
    )
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    engine = LMCacheEngine(
        config,
        metadata,
        HostMemoryAllocator(1 << 20),
        ChunkedTokenDatabase(config, metadata),
        connector,
    )
    tokens, kv = tokens_of(3 * CHUNK_SIZE), random_kv(3 * CHUNK_SIZE)
    for turn in range(3):
        engine.open()
        target = empty_kv(len(tokens))
        assert int(engine.retrieve(tokens, kvcaches=target).sum()) == (len(tokens) if turn else 0)
        engine.store(tokens, kvcaches=kv)
        engine.close()
    assert_equal_prefix(target, kv, len(tokens))
