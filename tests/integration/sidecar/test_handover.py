"""A sidecar process ends and hands over to storage what only it holds."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Sidecar, start_sidecar
from tests.fixtures.ports import free_port
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at
from tests.fixtures.waiting import wait_until

NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
STOP_S = 60.0
Start = Callable[..., Sidecar]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, quiet_environment()) as owner:
        yield owner


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Start:
    return partial(start_sidecar, processes, tmp_path)


def store_at(sidecar: Sidecar) -> None:
    with engine_at(sidecar.socket, **PATIENT) as engine:
        engine.store(tokens_of(NUM_TOKENS), kvcaches=random_kv(NUM_TOKENS, 1))
        assert engine.lookup(tokens_of(NUM_TOKENS), ["Hot"]) == NUM_TOKENS


def test_storage_gets_what_it_missed_while_it_was_away(start: Start, processes: Processes) -> None:
    lm_port = free_port()
    url = f"lm://127.0.0.1:{lm_port}"
    first = start("first", remote_url=url)
    store_at(first)
    wait_until(lambda: first.get("/v1/tiers")["tiers"]["storage"]["unkept_writes"] == NUM_CHUNKS)
    settings = {"port": 0, "lm_port": lm_port, "memory_gb": 0.01, "instance_id": "storage-0"}
    processes.start_service("storage", "lmcache_storage", settings)
    first.process.process.send_signal(signal.SIGTERM)
    assert first.process.process.wait(STOP_S) == 0
    assert f"drained: chunks={NUM_CHUNKS} handed_over={NUM_CHUNKS}" in first.process.tail()
    target = empty_kv(NUM_TOKENS)
    with engine_at(start("fresh", remote_url=url).socket, **PATIENT) as engine:
        wait_until(lambda: engine.lookup(tokens_of(NUM_TOKENS), ["storage"]) == NUM_TOKENS)
        assert engine.retrieve(tokens_of(NUM_TOKENS), kvcaches=target).all()
        assert engine.counters.value(RETRIEVED_TOKENS_TOTAL, "storage") == NUM_TOKENS
    assert_equal_prefix(target, random_kv(NUM_TOKENS, 1), NUM_TOKENS)
