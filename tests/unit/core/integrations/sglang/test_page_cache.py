"""The pages of a rank: what was looked up is loaded, whatever happens in between."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine.stores import create_chunk_store
from lmcache_core.engine.transfer import KVTransfer
from lmcache_core.gpu_connectors import PagedGPUConnector
from lmcache_core.gpu_connectors.layout import KVLayout, LayerGroup
from lmcache_core.integrations.sglang import page_cache as module
from lmcache_core.integrations.sglang.page_cache import PageCache
from lmcache_core.integrations.sglang.pools import Pool
from lmcache_core.memory import PinMemoryAllocator
from lmcache_core.record import Chunk
from lmcache_core.record.chunk_store import ChunkStore
from lmcache_core.telemetry import Counters

from tests.fixtures.kv import make_config
from tests.fixtures.waiting import wait_until

PAGE, NUM_PAGES, LAYERS, HEADS, SIZE = 16, 40, 4, 2, 8
METADATA = LMCacheEngineMetadata(
    "m", 1, 0, "sglang", "float32", (LAYERS, 2, PAGE, HEADS, SIZE), revision="r"
)


def pool(seed: int) -> Pool:
    """One with random content."""
    dice = torch.Generator().manual_seed(seed)
    pairs = [
        tuple(torch.randn(NUM_PAGES, PAGE, HEADS, SIZE, generator=dice) for _ in range(2))
        for _ in range(LAYERS)
    ]
    bands = [LayerGroup(name, LAYERS // 2, HEADS, SIZE, "float32") for name in ("first", "second")]
    return Pool(KVLayout(tuple(bands)), pairs, False)


def keys_of(numbers: Sequence[int]) -> list[str]:
    """Names of pages, as SGLang makes them."""
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]


def slots_of(pages: Sequence[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def content(of: Pool, pages: Sequence[int]) -> list[torch.Tensor]:
    return [side[list(pages)].clone() for layer in of.kvcaches for side in layer]


@pytest.fixture
def store() -> Iterator[ChunkStore]:
    config = make_config(tier_timeout_s=60.0)
    one = create_chunk_store(config, METADATA, PinMemoryAllocator(32 << 20), Counters())
    one.open(lambda salt: None)
    yield one
    one.close()


@contextmanager
def cache_of(
    store: ChunkStore, of: Pool, metadata: LMCacheEngineMetadata = METADATA, **options: Any
) -> Iterator[PageCache]:
    workers = Workers("digest")
    workers.open()
    connector = PagedGPUConnector(of.layout)
    transfer = KVTransfer(store, connector, metadata, Counters(), workers)
    cache = PageCache(
        *(store, transfer, connector, of, metadata, PAGE),
        lambda operation: nullcontext(),
        **{"tokens_per_s": 100.0} | options,
    )
    cache.use_salt("salt")
    cache.open()
    yield cache
    cache.close()
    workers.close()


def stored(cache: PageCache, numbers: Sequence[int], pages: Sequence[int]) -> bool:
    cache.store(keys_of(numbers), slots_of(pages), ())
    wait_until(lambda: cache.num_stored)
    return cache.take_stored()


def loaded(cache: PageCache, request: str, numbers: Sequence[int], pages: Sequence[int]) -> bool:
    cache.queue_load(request, keys_of(numbers), slots_of(pages))
    return run_loads(cache)


def run_loads(cache: PageCache) -> bool:
    done: queue.Queue[Sequence[int] | BaseException] = queue.Queue()
    cache.start_loads(cache.take_queued(), done.put, done.put)
    layers: list[int] = []
    while len(layers) < LAYERS:
        part = done.get(timeout=60.0)
        if isinstance(part, BaseException):
            return False
        layers += part
    assert layers == list(range(LAYERS))
    return True


def test_pages_of_one_engine_are_loaded_by_another_into_other_slots(store: ChunkStore) -> None:
    one, other = pool(1), pool(2)
    with cache_of(store, one) as first, cache_of(store, other) as second:
        assert stored(first, range(5), [7, 3, 9, 1, 0])
        assert second.lookup("r", keys_of([0, 1, 2, 99, 4])) == 3
        assert second.lookup("r", keys_of([0, 1, 2, 99, 4])) == 3, "asked again, it is held"
        before = content(other, [20])
        assert loaded(second, "r", range(3), [11, 12, 13])
    assert all(map(torch.equal, content(one, [7, 3, 9]), content(other, [11, 12, 13])))
    assert all(map(torch.equal, before, content(other, [20])))


def test_requests_of_one_batch_are_loaded_together(store: ChunkStore) -> None:
    """And fail together, with everything given back."""
    one, other = pool(1), pool(2)
    with cache_of(store, one) as first, cache_of(store, other) as second:
        assert stored(first, range(5), range(5))
        for name, numbers, pages in (("r", range(3), [3, 4, 5]), ("s", range(1, 5), [9, 8, 7, 6])):
            assert second.lookup(name, keys_of(numbers)) == len(numbers)
            second.queue_load(name, keys_of(numbers), slots_of(pages))
        assert run_loads(second)
        assert second.lookup("t", keys_of(range(3))) == 3
        second.queue_load("t", keys_of(range(3)), slots_of(range(20, 23)))
        second.queue_load("u", keys_of([0]), slots_of([23]))
        before = content(other, range(20, 24))
        assert not run_loads(second)
    assert all(map(torch.equal, content(one, [0, 1, 2]), content(other, [3, 4, 5])))
    assert all(map(torch.equal, content(one, [1, 2, 3, 4]), content(other, [9, 8, 7, 6])))
    assert all(map(torch.equal, before, content(other, range(20, 24))))


def test_fewer_pages_may_be_loaded_than_were_found(store: ChunkStore) -> None:
    """SGLang loads what all of its ranks have found."""
    one, other = pool(1), pool(2)
    with cache_of(store, one) as first, cache_of(store, other) as second:
        assert stored(first, range(5), range(5))
        assert second.lookup("r", keys_of(range(5))) == 5
        before = content(other, range(3, 40))
        assert loaded(second, "r", range(2), [1, 2])
    assert all(map(torch.equal, content(one, [0, 1]), content(other, [1, 2])))
    assert all(map(torch.equal, before, content(other, range(3, 40))))


@pytest.mark.parametrize(
    "other",
    [
        replace(METADATA, revision="other"),
        replace(METADATA, layout="other"),
        replace(METADATA, model_name="other"),
        replace(METADATA, world_size=2, worker_id=1),
    ],
)
def test_other_kv_is_not_found(store: ChunkStore, other: LMCacheEngineMetadata) -> None:
    one = pool(1)
    with cache_of(store, one) as first, cache_of(store, one, other) as second:
        assert stored(first, range(3), range(3))
        assert second.lookup("r", keys_of(range(3))) == 0
        first.use_salt("other")
        assert first.lookup("r", keys_of(range(3))) == 0


def test_a_page_counts_when_every_rank_has_stored_it(store: ChunkStore) -> None:
    ranks = [replace(METADATA, world_size=2, worker_id=rank) for rank in range(2)]
    one, other = pool(1), pool(2)
    with cache_of(store, one, ranks[0]) as first, cache_of(store, other, ranks[1]) as second:
        assert stored(first, range(3), range(3))
        assert first.lookup("r", keys_of(range(3))) == 0
        assert stored(second, range(2), range(2))
        assert first.lookup("r", keys_of(range(3))) == 0, "not asked again at once"
        assert first.lookup("s", keys_of(range(3))) == 2


def test_what_was_not_found_cannot_be_loaded(store: ChunkStore) -> None:
    """And the load ends."""
    one = pool(1)
    with cache_of(store, one) as cache:
        assert not loaded(cache, "r", range(3), range(3))
        assert stored(cache, range(3), range(3))
        assert cache.lookup("r", keys_of(range(3))) == 3
        assert not loaded(cache, "r", [0, 2], range(2)), "other pages than those"
        assert cache.lookup("r", keys_of(range(3))) == 3
        assert not loaded(cache, "r", range(4), range(4)), "more than that"


def test_what_nobody_loads_is_given_back(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang does not say that a request has ended that waited for its turn."""
    released: list[int] = []
    release = store.release

    def counted(chunks: Sequence[Any]) -> bool:
        released.append(len(chunks))
        return release(chunks)

    one = pool(1)
    with cache_of(store, one) as cache:
        assert stored(cache, range(3), range(3))
        monkeypatch.setattr(module, "SWEEP_S", 0.01)
        monkeypatch.setattr(store, "release", counted)
        assert cache.lookup("r", keys_of(range(3))) == 3
        monkeypatch.setattr(module, "HELD_S", 0.0)
        assert not loaded(cache, "s", [9], [9])  # the thread waits with the new interval from then
        wait_until(lambda: released == [3])


def test_a_queued_load_may_be_cancelled(store: ChunkStore) -> None:
    one = pool(1)
    with cache_of(store, one) as cache:
        assert stored(cache, range(3), range(3))
        assert cache.lookup("r", keys_of(range(3))) == 3
        cache.queue_load("r", keys_of(range(3)), slots_of(range(3)))
        assert cache.cancel_load("r")
        assert not cache.cancel_load("r")
        assert cache.take_queued() == []
        assert cache.lookup("r", keys_of(range(3))) == 3


def test_nothing_is_found_that_was_stored_before_a_reset(store: ChunkStore) -> None:
    """The weights may have been replaced; others find it still."""
    one = pool(1)
    with cache_of(store, one) as cache, cache_of(store, one) as other:
        assert stored(cache, range(3), range(3))
        cache.store(keys_of([3]), slots_of([3]), ())
        cache.lookup("r", keys_of(range(3)))
        cache.queue_load("r", keys_of(range(3)), slots_of(range(3)))
        cache.reset()
        assert (cache.num_stored, cache.take_queued()) == (0, [])
        assert cache.lookup("r", keys_of(range(3))) == 0
        assert stored(cache, [5], [5])
        assert cache.lookup("s", keys_of([5])) == 1
        assert other.lookup("r", keys_of(range(4))) == 4
        assert other.lookup("s", keys_of([5])) == 0


def test_stores_end_in_order_also_those_that_are_refused(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang counts them on every rank."""
    one = pool(1)
    go = threading.Event()

    class Late:
        def synchronize(self) -> None:
            assert go.wait(60.0)

    monkeypatch.setattr(module, "MAX_STORING_PAGES", 4)
    with cache_of(store, one) as cache:
        cache.store(keys_of(range(3)), slots_of(range(3)), [Late()])
        cache.store(keys_of(range(3, 6)), slots_of(range(3)), [])
        assert cache.num_stored == 0
        go.set()
        wait_until(lambda: cache.num_stored == 2)
        assert [cache.take_stored() for _ in range(2)] == [True, False]
        assert stored(cache, range(6, 9), range(3))


def test_a_rank_that_does_not_store_says_that_it_has(store: ChunkStore) -> None:
    one = pool(1)
    with cache_of(store, one, stores=False) as cache:
        assert stored(cache, range(3), range(3))
        assert cache.lookup("r", keys_of(range(3))) == 0


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_pages_that_the_store_may_not_have_held_are_checked_when_they_are_copied(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, is_overwritten: bool
) -> None:
    """The sidecar died after the lookup: its memory may be another one's by now."""
    one, other = pool(1), pool(2)
    release = store.release
    with cache_of(store, one) as first, cache_of(store, other) as second:
        assert stored(first, range(3), range(3))
        get = store.get
        found: list[Chunk] = []
        monkeypatch.setattr(
            store, "get", lambda *args, **more: found.extend(get(*args, **more)) or found
        )
        assert second.lookup("r", keys_of(range(3))) == 3
        monkeypatch.setattr(store, "holds", lambda chunks: False)
        monkeypatch.setattr(store, "release", lambda chunks: release(chunks) and False)
        if is_overwritten:
            found[1].memory.byte_array[7] ^= 1
        assert loaded(second, "r", range(3), range(3)) != is_overwritten
