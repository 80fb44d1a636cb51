"""An engine's retrieve goes on when the sidecar that serves its chunks is killed in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.concurrency import LoopThread
from lmcache_core.engine import LMCacheEngine
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually
from tests.fixtures.peers import Proxy
from tests.fixtures.processes import Processes
from tests.fixtures.redis_server import free_port
from tests.fixtures.sidecar import engine_at
from tests.fixtures.tls_engines import tls_engines

NUM_CHUNKS = 64
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
SLOW_BYTES_PER_S = 100_000


@pytest.fixture
def neighbourhood(tmp_path: Path) -> Iterator[Neighbourhood]:
    with Processes(tmp_path, quiet_environment()) as processes:
        yield Neighbourhood(processes, tmp_path)


@contextmanager
def slow_line() -> Iterator[Proxy]:
    """Before nothing yet."""
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
    """One that peers reach through a slow line only, and prefer."""
    with slow_line() as proxy:
        url = f"lm://127.0.0.1:{proxy.port}"
        sidecar = neighbourhood.sidecar(name, distributed_url=url, node="here", tier_timeout_s=8.0)
        proxy.target = sidecar.ports["lm_port"]
        yield sidecar, proxy


def kill_in_the_middle(sidecar: Sidecar, proxy: Proxy, after_bytes: int) -> threading.Thread:
    begin = proxy.num_passed

    def wait_and_kill() -> None:
        deadline = time.monotonic() + 20
        while proxy.num_passed - begin < after_bytes and time.monotonic() < deadline:
            time.sleep(0.002)
        sidecar.process.kill()

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


def stored_in_a_directory(neighbourhood: Neighbourhood, directory: Path) -> str:
    """The URL of a shared directory that has all chunks; who wrote them is gone."""
    directory.mkdir()
    url = f"file://{directory}"
    writer = neighbourhood.sidecar("writer", remote_url=url)
    store_at(writer)
    writer.process.kill()
    return url


def store_at(sidecar: Sidecar) -> None:
    with engine_at(sidecar.socket, tier_timeout_s=9.0) as engine:
        engine.store(tokens_of(NUM_TOKENS, 1), kvcaches=random_kv(NUM_TOKENS, 1))
    eventually(lambda: sidecar.get("/v1/status")["settled"])


def retrieve_while_it_dies(victim: Sidecar, proxy: Proxy, reader: Sidecar) -> dict[str, int]:
    """Tokens by the tier that they came from."""
    with engine_at(reader.socket, tier_timeout_s=9.0) as engine:
        return retrieve_by(engine, victim, proxy)


def retrieve_by(
    engine: LMCacheEngine, victim: Sidecar, proxy: Proxy, after_bytes: int = 6_000
) -> dict[str, int]:
    kv, target = random_kv(NUM_TOKENS, 1), empty_kv(NUM_TOKENS)
    killer = kill_in_the_middle(victim, proxy, after_bytes)
    assert engine.retrieve(tokens_of(NUM_TOKENS, 1), kvcaches=target).all()
    tiers = {
        tier: engine.counters.value(RETRIEVED_TOKENS_TOTAL, tier) for tier in ("peers", "storage")
    }
    killer.join()
    assert_equal_prefix(target, kv, NUM_TOKENS)
    return tiers


def check_both(tiers: dict[str, int]) -> None:
    """Some came from the peer, the rest from storage."""
    assert min(tiers.values()) > 0
    assert sum(tiers.values()) == NUM_TOKENS


def test_the_rest_comes_from_another_holder(neighbourhood: Neighbourhood) -> None:
    with slow_sidecar(neighbourhood, "a") as (a, proxy):
        b = neighbourhood.sidecar("b")
        reader = neighbourhood.sidecar("reader", node="here", tier_timeout_s=8.0)
        store_at(a)
        store_at(b)
        assert retrieve_while_it_dies(a, proxy, reader) == {
            "peers": NUM_TOKENS,
            "storage": 0,
        }
        figures = reader.get("/v1/tiers")["tiers"]["peers"]
        assert figures["failed_over_chunks"] > 0


def test_the_rest_comes_from_storage(neighbourhood: Neighbourhood, tmp_path: Path) -> None:
    url = stored_in_a_directory(neighbourhood, tmp_path / "shared")
    with slow_sidecar(neighbourhood, "a") as (a, proxy):
        reader = neighbourhood.sidecar("reader", node="here", remote_url=url, tier_timeout_s=8.0)
        store_at(a)
        tiers = retrieve_while_it_dies(a, proxy, reader)
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
        reader = engines.start(remote_url=url, tier_timeout_s=9.0, prefill_tokens_per_s=1.0)
        eventually(lambda: reader.lookup(tokens_of(NUM_TOKENS, 1), ["P2PBackend"]) == NUM_TOKENS)
        tiers = retrieve_by(reader, a, proxy, after_bytes=20_000)
    check_both(tiers)


def test_an_engine_without_a_sidecar_gets_the_rest_from_storage(
    neighbourhood: Neighbourhood, tmp_path: Path
) -> None:
    url = stored_in_a_directory(neighbourhood, tmp_path / "shared")
    peers: dict[str, Any] = {
        "enable_p2p": True,
        "lookup_url": neighbourhood.lookup_url,
        "broker_url": neighbourhood.broker_url,
        "distributed_url": f"lm://127.0.0.1:{free_port()}",
        "peer_ticket_keys_file": str(neighbourhood.ticket_keys),
    }
    with slow_sidecar(neighbourhood, "a") as (a, proxy):
        store_at(a)
        with embedded_engine(
            remote_url=url, tier_timeout_s=9.0, prefill_tokens_per_s=1.0, **peers
        ) as made:
            eventually(
                lambda: made.engine.lookup(tokens_of(NUM_TOKENS, 1), ["P2PBackend"]) == NUM_TOKENS
            )
            tiers = retrieve_by(made.engine, a, proxy)
        check_both(tiers)
