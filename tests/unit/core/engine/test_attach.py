"""The canary through a real engine: embedded, and at a sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import (
    GPUConnectorInterface,
    KVLayout,
    LayerGroup,
    LogicalMemory,
    PagedGPUConnector,
    VLLMNestedTupleGPUConnector,
)
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.fixtures.kv import HIDDEN, NUM_LAYERS, make_config, make_metadata
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

HYBRID = KVLayout(
    (
        LayerGroup("full", 2, 4, 8, "float32", packing="kv_first"),
        LayerGroup("window", 3, 2, 8, "float32", packing="kv_first"),
    )
)


@contextmanager
def engine_with(
    connector: GPUConnectorInterface, layout: KVLayout = HYBRID, socket: Path | None = None
) -> Iterator[LMCacheEngine]:
    config = make_config() if socket is None else make_config(sidecar_socket=str(socket))
    allocator = HostMemoryAllocator(1 << 22) if socket is None else None
    metadata = make_metadata(layout=layout.fingerprint())
    database = ChunkedTokenDatabase(config, metadata)
    with LMCacheEngine(config, metadata, allocator, database, connector) as engine:
        yield engine


def test_attaching_a_declared_layout_leaves_memory_and_cache_as_they_were() -> None:
    pages = make_kv_caches(HYBRID, 3)
    before = snapshot(pages)
    with engine_with(PagedGPUConnector(HYBRID)) as engine:
        engine.attach(pages, LogicalMemory(HYBRID, pages))
        assert same(snapshot(pages), before)
        assert engine.stats()["memory"]["num_chunks"] == 0


def test_a_layout_declared_wrongly_is_refused() -> None:
    """K and V of a layer are apart in the first dimension, or in the second: with two blocks the
    shapes are equal.
    """
    actual, declared = (one_group(packing=packing) for packing in ("kv_first", "block_first"))
    pages = make_kv_caches(actual, 3, sizes=(2, 4))
    before = snapshot(pages)
    with (
        engine_with(PagedGPUConnector(declared), declared) as engine,
        pytest.raises(ValueError, match="canary"),
    ):
        engine.attach(pages, LogicalMemory(actual, pages))
    assert same(snapshot(pages), before)


def test_a_connector_without_pages_has_nothing_to_check() -> None:
    with (
        engine_with(VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)) as engine,
        pytest.raises(TypeError, match="VLLMNestedTupleGPUConnector"),
    ):
        engine.attach([], LogicalMemory(HYBRID, make_kv_caches(HYBRID, 3)))
