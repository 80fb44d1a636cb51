"""A released LMCache, unmodified, with a cache_storage of ours as its remote tier. Run by `make
test-lmcache`.
"""

from __future__ import annotations

import random
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.service_process import ServiceProcess, running_service
from tests.lmcache.engines import CHUNK_TOKENS, LMCacheEngine, lmcache_engines

NUM_TOKENS = 8 * CHUNK_TOKENS
CHUNK_BYTES = 2 * 4 * CHUNK_TOKENS * 128 * 2
MAX_CHUNKS = 40


def prompt(name: object, num_tokens: int = NUM_TOKENS) -> list[int]:
    dice = random.Random(str(name))
    return [dice.randrange(32_000) for _ in range(num_tokens)]


def environ(**options: object) -> dict[str, str]:
    settings = {
        "port": 0,
        "lm_port": 0,
        "memory_gb": MAX_CHUNKS * CHUNK_BYTES / (1 << 30),
        "instance_id": "storage-0",
        "lmcache_compat_port": 0,
        "lmcache_compat_tenant": "acme",
    }
    return {
        f"LMCACHE_STORAGE_{name.upper()}": str(value)
        for name, value in (settings | options).items()
    }


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("storage")
    with running_service("lmcache_storage", directory, environ()) as service:
        yield service


@pytest.fixture(scope="module")
def engines(
    storage: ServiceProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[LMCacheEngine]]:
    with lmcache_engines(
        port_of(storage), tmp_path_factory.mktemp("engines"), "one", "two"
    ) as started:
        yield started


def port_of(service: ServiceProcess) -> int:
    return service.ports["lmcache_compat_port"]


def metrics(service: ServiceProcess) -> str:
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=10) as answer:
        return str(answer.read(), "utf-8")


def test_what_one_engine_stores_another_loads_bit_for_bit(engines: list[LMCacheEngine]) -> None:
    one, two = engines
    tokens, other = prompt("a"), prompt("b")
    assert one.lookup(tokens) == 0
    assert one.retrieve(tokens) == 0
    one.store(tokens)
    one.wait_stored(tokens)
    assert one.retrieve(tokens) == NUM_TOKENS
    assert two.retrieve(tokens) == NUM_TOKENS
    assert two.retrieve(tokens[: 3 * CHUNK_TOKENS] + other) == 3 * CHUNK_TOKENS
    assert two.retrieve(other) == 0
    two.store(other)
    one.wait_stored(other)
    assert one.retrieve(other) == NUM_TOKENS


def test_a_stranger_between_two_engines_harms_nobody(
    storage: ServiceProcess, engines: list[LMCacheEngine]
) -> None:
    with socket.create_connection(("127.0.0.1", port_of(storage)), timeout=10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: storage\r\n\r\n" + bytes(200))
        for i in range(6):
            writer, reader = engines[i % 2], engines[1 - i % 2]
            tokens = prompt(i)
            writer.store(tokens)
            reader.wait_stored(tokens)
            assert reader.retrieve(tokens) == NUM_TOKENS
        assert stranger.recv(1) == b""
    lines = metrics(storage).splitlines()
    closed = [
        line
        for line in lines
        if line.startswith("lmcache_storage_compat_closed_total{") and not line.endswith(" 0.0")
    ]
    assert closed == ['lmcache_storage_compat_closed_total{reason="command"} 1.0'], (
        "no engine was cut off"
    )


def test_more_than_fits_is_evicted_and_never_wrong(engines: list[LMCacheEngine]) -> None:
    one, two = engines
    prompts = [prompt(f"many {i}") for i in range(10)]
    for tokens in prompts:
        one.store(tokens)
        one.wait_stored(tokens)
    loaded = [two.retrieve(tokens) for tokens in prompts]
    assert loaded[-1] == NUM_TOKENS
    assert sum(loaded) <= MAX_CHUNKS * CHUNK_TOKENS


def test_what_was_stored_outlives_the_storage(tmp_path: Path) -> None:
    tokens = prompt("a")
    with running_service(
        "lmcache_storage", tmp_path, environ(disk_path=tmp_path / "disk", disk_gb=0.2)
    ) as storage:
        with lmcache_engines(port_of(storage), tmp_path, "first") as [first]:
            first.store(tokens)
            first.wait_stored(tokens)
            storage.stop(signal.SIGTERM)
            assert first.lookup(tokens) == 0, "an engine whose storage is away goes without"
            assert first.retrieve(tokens) == 0
        storage.start()
        with lmcache_engines(port_of(storage), tmp_path, "second") as [second]:
            second.wait_stored(tokens)
            assert second.retrieve(tokens) == NUM_TOKENS
            second.close()
