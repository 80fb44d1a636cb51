"""A retrieve whose serving sidecar is killed gets the rest from storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.concurrency import LoopThread
from lmcache_core.engine import LMCacheEngine
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL

from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually
from tests.fixtures.peers import Proxy
from tests.fixtures.sidecar import engine_at
from tests.fixtures.tls_engines import tls_engines
from tests.fixtures.waiting import wait_until

NUM_CHUNKS = 64
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
SLOW_BYTES_PER_S = 100_000


@contextmanager
def slow_line() -> Iterator[Proxy]:
    """Yield a slow proxy without a target yet."""
    loop = LoopThread("proxy")
    loop.open()
    proxy = Proxy(0, SLOW_BYTES_PER_S)
    loop.run(proxy.open(), 5)
    try:
        yield proxy
    finally:
        loop.run(proxy.close(), 5)
        loop.close()


@contextmanager
def slow_sidecar(neighbourhood: Neighbourhood, name: str) -> Iterator[tuple[Sidecar, Proxy]]:
    """Yield a sidecar that peers prefer, and reach only through a slow line."""
    with slow_line() as proxy:
        url = f"lm://127.0.0.1:{proxy.port}"
        sidecar = neighbourhood.sidecar(name, distributed_url=url, node="here", tier_timeout_s=60.0)
        proxy.target = sidecar.ports["lm_port"]
        yield sidecar, proxy


def kill_in_the_middle(sidecar: Sidecar, proxy: Proxy, after_bytes: int) -> threading.Thread:
    begin = proxy.num_passed

    def wait_and_kill() -> None:
        wait_until(lambda: proxy.num_passed - begin >= after_bytes)
        sidecar.process.kill()

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


def stored_in_a_directory(neighbourhood: Neighbourhood, directory: Path) -> str:
    """Return the URL of a directory with all chunks, whose writer is gone."""
    directory.mkdir()
    url = f"file://{directory}"
    writer = neighbourhood.sidecar("writer", remote_url=url)
    store_at(writer)
    writer.process.kill()
    return url


def store_at(sidecar: Sidecar) -> None:
    with engine_at(sidecar.socket, tier_timeout_s=60.0) as engine:
        engine.store(tokens_of(NUM_TOKENS, 1), kvcaches=random_kv(NUM_TOKENS, 1))
    eventually(lambda: sidecar.get("/v1/status")["settled"])


def retrieve_while_it_dies(
    engine: LMCacheEngine, victim: Sidecar, proxy: Proxy, after_bytes: int
) -> dict[str, int]:
    """Return the number of tokens from each tier."""
    kv, target = random_kv(NUM_TOKENS, 1), empty_kv(NUM_TOKENS)
    killer = kill_in_the_middle(victim, proxy, after_bytes)
    assert engine.retrieve(tokens_of(NUM_TOKENS, 1), kvcaches=target).all()
    tiers = {
        tier: engine.counters.value(RETRIEVED_TOKENS_TOTAL, tier) for tier in ("peers", "storage")
    }
    killer.join()
    assert_equal_prefix(target, kv, NUM_TOKENS)
    return tiers


def test_the_rest_comes_from_storage(neighbourhood: Neighbourhood, tmp_path: Path) -> None:
    url = stored_in_a_directory(neighbourhood, tmp_path / "shared")
    with slow_sidecar(neighbourhood, "a") as (a, proxy):
        reader = neighbourhood.sidecar("reader", node="here", remote_url=url, tier_timeout_s=60.0)
        store_at(a)
        with engine_at(reader.socket, tier_timeout_s=60.0) as engine:
            tiers = retrieve_while_it_dies(engine, a, proxy, after_bytes=6_000)
        assert tiers["storage"] > 0
        assert sum(tiers.values()) == NUM_TOKENS


def test_an_engine_that_pulls_over_tls_gets_the_rest_from_storage(
    neighbourhood: Neighbourhood, tmp_path: Path
) -> None:
    url = stored_in_a_directory(neighbourhood, tmp_path / "shared")
    with tls_engines(neighbourhood, tmp_path) as engines, slow_line() as proxy:
        a = engines.sidecar("a", distributed_url=f"lm+tls://127.0.0.1:{proxy.port}")
        proxy.target = a.ports["lm_port"]
        store_at(a)
        reader = engines.start(remote_url=url, tier_timeout_s=60.0, prefill_tokens_per_s=1.0)
        eventually(lambda: reader.lookup(tokens_of(NUM_TOKENS, 1), ["P2PBackend"]) == NUM_TOKENS)
        tiers = retrieve_while_it_dies(reader, a, proxy, after_bytes=20_000)
    assert min(tiers.values()) > 0
    assert sum(tiers.values()) == NUM_TOKENS
