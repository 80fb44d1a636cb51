"""However a process closes its engine, what it has stored reaches the slower tiers, and it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.concurrency import LoopThread

from tests.fixtures.closing_child import PROMPTS
from tests.fixtures.embedded import embedded_engine
from tests.fixtures.forked_children import PATIENCE_S, WarmParent, warm_parent
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import kv_of
from tests.fixtures.wire import MemoryStore, serving

WAYS = (
    "exit_handler",
    "last_exit_handler",
    "thread_at_exit",
    "finalizer_at_exit",
    "weak_finalizer",
    "garbage_collector",
    "garbage_collector_of_its_loop",
    "signal_then_exit",
    "signal_then_sudden_exit",
    "twice",
    "two_threads",
    "running_loop",
    "not_at_all",
)
NUM_CHUNKS = sum(len(tokens) // CHUNK_SIZE for tokens in PROMPTS)


@contextlib.contextmanager
def storage_server() -> Iterator[tuple[MemoryStore, str]]:
    """A server in this process, and its URL."""
    store, loop = MemoryStore(), LoopThread("test-server")
    loop.open()
    context = serving(store)
    try:
        server = loop.run(context.__aenter__(), PATIENCE_S)
        yield store, f"lm://127.0.0.1:{server.port}"
    finally:
        loop.run(context.__aexit__(None, None, None), PATIENCE_S)
        loop.close()


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmParent]:
    directory = tmp_path_factory.mktemp("children")
    with warm_parent("tests.fixtures.closing_child", directory) as parent:
        yield parent


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("way", WAYS)
def test_no_acknowledged_write_is_lost(way: str, children: WarmParent, tmp_path: Path) -> None:
    with storage_server() as (store, url):
        children.run(way, str(tmp_path), url)
        assert len(store.chunks) >= NUM_CHUNKS
    with embedded_engine(tmp_path, tier_timeout_s=60.0, prefill_tokens_per_s=0.001) as cache:
        for tokens in PROMPTS:
            target = empty_kv(len(tokens))
            assert cache.engine.retrieve(tokens, kvcaches=target).all()
            assert_equal_prefix(target, kv_of(tokens), len(tokens))


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("way", ["exit_handler", "finalizer_at_exit", "signal_then_exit"])
def test_an_engine_with_memory_alone_closes_quietly(way: str, children: WarmParent) -> None:
    children.run(way, "-", "-")
