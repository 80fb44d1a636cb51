"""The canary through a real engine: embedded, and at a sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import (
    KVLayout,
    LayerGroup,
    LogicalMemory,
    PagedGPUConnector,
    VLLMNestedTupleGPUConnector,
)
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.fixtures.kv import HIDDEN, NUM_LAYERS, make_config, make_metadata
from tests.fixtures.sidecar import running_socket

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE = 12, 4, 4, 8
HYBRID = KVLayout(
    (
        LayerGroup("full", 2, NUM_HEADS, HEAD_SIZE, "float32", packing="kv_first"),
        LayerGroup("window", 3, 2, HEAD_SIZE, "float32", packing="kv_first"),
    )
)


def pages_of(layout: KVLayout) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.rand(
            (2, NUM_BLOCKS, BLOCK_SIZE, group.num_kv_heads, group.head_size), generator=generator
        )
        for group in layout.groups
        for _ in range(group.num_layers)
    ]


@contextmanager
def engine_with(layout: KVLayout, socket: Path | None = None) -> Iterator[LMCacheEngine]:
    config = make_config() if socket is None else make_config(sidecar_socket=str(socket))
    allocator = HostMemoryAllocator(1 << 22) if socket is None else None
    metadata = make_metadata(layout=layout.fingerprint())
    engine = LMCacheEngine(
        config,
        metadata,
        allocator,
        ChunkedTokenDatabase(config, metadata),
        PagedGPUConnector(layout),
    )
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


def test_attaching_a_declared_layout_leaves_memory_and_cache_as_they_were() -> None:
    pages = pages_of(HYBRID)
    before = [page.clone() for page in pages]
    with engine_with(HYBRID) as engine:
        engine.attach(pages, LogicalMemory(HYBRID, pages))
        assert all(torch.equal(now, then) for now, then in zip(pages, before, strict=True))
        assert engine.stats()["memory"]["num_chunks"] == 0


def test_a_layout_declared_wrongly_is_refused() -> None:
    """K and V of a layer are apart in the first dimension, or in the second: the shapes are
    equal.
    """
    layout = KVLayout((LayerGroup("", 2, NUM_HEADS, HEAD_SIZE, "float32", packing="kv_first"),))
    wrong = KVLayout((LayerGroup("", 2, NUM_HEADS, HEAD_SIZE, "float32", packing="block_first"),))
    pages = [torch.rand(2, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE) for _ in range(2)]
    before = [page.clone() for page in pages]
    with engine_with(wrong) as engine, pytest.raises(ValueError, match="canary"):
        engine.attach(pages, LogicalMemory(layout, pages))
    assert all(torch.equal(now, then) for now, then in zip(pages, before, strict=True))


def test_an_engine_attaches_with_a_sidecar_and_while_it_is_absent(tmp_path: Path) -> None:
    pages = pages_of(HYBRID)
    with running_socket(tmp_path) as running, engine_with(HYBRID, running.path) as engine:
        engine.attach(pages, LogicalMemory(HYBRID, pages))
    with engine_with(HYBRID, tmp_path / "absent.sock") as engine:
        engine.attach(pages, LogicalMemory(HYBRID, pages))


def test_a_connector_without_pages_has_nothing_to_check() -> None:
    config, metadata = make_config(), make_metadata()
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    engine = LMCacheEngine(
        config,
        metadata,
        HostMemoryAllocator(1 << 20),
        ChunkedTokenDatabase(config, metadata),
        connector,
    )
    with pytest.raises(TypeError, match="VLLMNestedTupleGPUConnector"):
        engine.attach([], LogicalMemory(HYBRID, pages_of(HYBRID)))
