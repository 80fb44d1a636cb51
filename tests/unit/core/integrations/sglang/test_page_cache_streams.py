"""A rank whose copies and forward passes run on streams: fakes, which run as late as they may."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from lmcache_core.gpu_connectors import PagedGPUConnector, staging
from lmcache_core.record.chunk_store import ChunkStore

from tests.fixtures import cuda_streams
from tests.fixtures.cuda_streams import STAGING_TOKENS, Runtime
from tests.fixtures.held_clock import HeldClock
from tests.unit.core.integrations.sglang import test_page_cache as on_host
from tests.unit.core.integrations.sglang.test_page_cache import (
    LAYERS,
    cache_of,
    content,
    keys_of,
    pool,
    slots_of,
    stored,
)

NUMBERS, STORED_PAGES, LOADED_PAGES = range(3), (7, 3, 9), (11, 12, 13)
store = on_host.store


@pytest.fixture
def runtime(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """The device; copies into the store's memory have been made by the host."""
    with cache_of(store, pool(1)) as first:
        assert stored(first, NUMBERS, STORED_PAGES)
    runtime = cuda_streams.install(monkeypatch)
    monkeypatch.setattr(
        on_host, "PagedGPUConnector", lambda layout: PagedGPUConnector(layout, STAGING_TOKENS)
    )
    return runtime


def test_layers_are_there_when_they_are_said_to_be_and_later_ones_are_not(
    store: ChunkStore, runtime: Runtime
) -> None:
    one, other = pool(1), pool(2)
    said: queue.Queue[tuple[Sequence[int], list[bool]] | BaseException] = queue.Queue()

    def are_there() -> list[bool]:
        return [
            all(
                torch.equal(mine[list(STORED_PAGES)], its[list(LOADED_PAGES)])
                for mine, its in zip(one.kvcaches[layer], other.kvcaches[layer], strict=True)
            )
            for layer in range(LAYERS)
        ]

    with cache_of(store, other) as second:
        assert second.lookup("r", keys_of(NUMBERS)) == 3
        second.queue_load("r", keys_of(NUMBERS), slots_of(LOADED_PAGES))
        second.start_loads(
            second.take_queued(), lambda layers: said.put((layers, are_there())), said.put
        )
        found = [said.get(timeout=60.0) for _ in range(2)]
    assert found == [
        (range(2), [True, True, False, False]),
        (range(2, 4), [True] * 4),
    ]
    page = sum(side[0].nbytes for layer in one.kvcaches for side in layer)
    assert sum(runtime.copied_bytes) == len(NUMBERS) * page, "each byte once"


def test_a_load_begins_behind_what_was_launched_before(store: ChunkStore, runtime: Runtime) -> None:
    """The slots' numbers are computed on the device; their last owner may still write to them."""
    one, other = pool(1), pool(2)
    slots = torch.zeros(len(slots_of(LOADED_PAGES)), dtype=torch.int64)
    with cache_of(store, other) as second:
        assert second.lookup("r", keys_of(NUMBERS)) == 3
        slots.copy_(slots_of(LOADED_PAGES), non_blocking=True)
        for side in (side for layer in other.kvcaches for side in layer):
            runtime.launch("forward", side[11:14].zero_)
        second.queue_load("r", keys_of(NUMBERS), slots)
        assert on_host.run_loads(second)
    runtime.compute.synchronize()
    assert all(map(torch.equal, content(one, STORED_PAGES), content(other, LOADED_PAGES)))


def test_pages_are_stored_behind_the_forward_pass_that_fills_them(
    store: ChunkStore, runtime: Runtime
) -> None:
    one, other = pool(3), pool(4)
    with cache_of(store, other) as second:
        for mine, its in zip(one.kvcaches, other.kvcaches, strict=True):
            for source, target in zip(mine, its, strict=True):
                target.copy_(source, non_blocking=True)
        second.store(keys_of([50, 51]), slots_of([1, 2]), [runtime.compute.record_event()])
        on_host.wait_until(lambda: second.num_stored)
        assert second.take_stored()
    reader = pool(5)
    with cache_of(store, reader) as third:
        assert third.lookup("r", keys_of([50, 51])) == 2
        third.queue_load("r", keys_of([50, 51]), slots_of([30, 31]))
        assert on_host.run_loads(third)
    assert all(map(torch.equal, content(one, [1, 2]), content(reader, [30, 31])))


def test_memory_for_copies_is_taken_before_requests_come(
    store: ChunkStore, runtime: Runtime
) -> None:
    with cache_of(store, pool(2)) as second:
        num_taken = len(runtime.taken)
        assert num_taken == 4
        assert second.lookup("r", keys_of(NUMBERS)) == 3
        second.queue_load("r", keys_of(NUMBERS), slots_of(LOADED_PAGES))
        assert on_host.run_loads(second)
        assert stored(second, range(3, 6), STORED_PAGES)
        assert len(runtime.taken) == num_taken


def test_nothing_is_found_while_the_device_has_no_room_for_copies(
    store: ChunkStore, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ends a request whose load fails with an error."""
    clock = HeldClock()
    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=clock))
    runtime.has_room = False
    with cache_of(store, pool(2)) as second:
        assert second.lookup("r", keys_of(NUMBERS)) == 0
        assert not stored(second, range(3, 6), STORED_PAGES)
        assert runtime.num_refused == 1
        clock.now_s += staging.REST_S
        runtime.has_room = True
        assert second.lookup("s", keys_of(NUMBERS)) == 3
        second.queue_load("s", keys_of(NUMBERS), slots_of(LOADED_PAGES))
        assert on_host.run_loads(second)
