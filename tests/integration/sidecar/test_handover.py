"""A sidecar process ends and hands over to storage what only it holds, within its time."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Sidecar, start_sidecar
from tests.fixtures.processes import Processes
from tests.fixtures.redis_server import free_port
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


def terminate(sidecar: Sidecar) -> None:
    sidecar.process.process.send_signal(signal.SIGTERM)


def test_storage_gets_what_it_missed_while_it_was_away(start: Start, processes: Processes) -> None:
    lm_port = free_port()
    url = f"lm://127.0.0.1:{lm_port}"
    first = start("first", remote_url=url)
    store_at(first)
    wait_until(lambda: first.get("/v1/tiers")["tiers"]["storage"]["unkept_writes"] == NUM_CHUNKS)
    settings = {"port": 0, "lm_port": lm_port, "memory_gb": 0.01, "instance_id": "storage-0"}
    processes.start_service("storage", "lmcache_storage", settings)
    terminate(first)
    assert first.process.process.wait(STOP_S) == 0
    assert f"drained: chunks={NUM_CHUNKS} handed_over={NUM_CHUNKS}" in first.process.tail()
    target = empty_kv(NUM_TOKENS)
    with engine_at(start("fresh", remote_url=url).socket, **PATIENT) as engine:
        wait_until(lambda: engine.lookup(tokens_of(NUM_TOKENS), ["storage"]) == NUM_TOKENS)
        assert engine.retrieve(tokens_of(NUM_TOKENS), kvcaches=target).all()
        assert engine.counters.value(RETRIEVED_TOKENS_TOTAL, "storage") == NUM_TOKENS
    assert_equal_prefix(target, random_kv(NUM_TOKENS, 1), NUM_TOKENS)


@pytest.fixture
def hanging_url() -> Iterator[str]:
    """The URL of a server that accepts connections and sends nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                accepted.append(listener.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept)
    thread.start()
    yield f"lm://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for connection in (listener, *accepted):
        connection.close()


def test_a_hanging_target_ends_the_drain_at_its_timeout(start: Start, hanging_url: str) -> None:
    sidecar = start("stuck", remote_url=hanging_url, drain_timeout_s=2.0)
    store_at(sidecar)
    terminate(sidecar)
    assert sidecar.process.process.wait(STOP_S) == 0
    assert f"refused=0 left={NUM_CHUNKS}" in sidecar.process.tail()
    assert not sidecar.socket.exists()


def test_a_second_sigterm_ends_it_at_once(start: Start, hanging_url: str) -> None:
    sidecar = start("stuck", remote_url=hanging_url, drain_timeout_s=600.0)
    store_at(sidecar)
    terminate(sidecar)
    wait_until(lambda: sidecar.get("/v1/status")["drain"]["state"] == "handing_over")
    assert sidecar.get("/v1/status")["drain"]["left"] == NUM_CHUNKS
    terminate(sidecar)
    assert sidecar.process.process.wait(STOP_S) == 128 + signal.SIGTERM
