"""What a real vLLM asks of a sidecar, and what it no longer asks of one that answers late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.sidecar import connection as client_connection

from tests.fixtures.late_socket import LateSocket, late_socket
from tests.vllm.engines import CHUNK_SIZE, Ask, Engine, running_engine
from tests.vllm.processes import Service
from tests.vllm.references import prompt
from tests.vllm.sidecars import await_calm, eventually, socket_of
from tests.vllm.worlds import World, is_found

LATE_S = 0.05
PATIENCE_S = 0.25  # more than a busy machine adds to the answer of a local sidecar
HASTY = {"lmcache_prefill_tokens_per_s": 1e6}


@pytest.fixture
def sidecar(world: World) -> Service:
    return world.sidecar()


@pytest.fixture
def relay(world: World, sidecar: Service, tmp_path: Path) -> Iterator[LateSocket]:
    with late_socket(tmp_path / "late.sock", socket_of(world.owner)) as relay:
        yield relay


def asked(engine: Engine, relay: LateSocket, ask: Ask) -> tuple[list[str], int]:
    """The questions that one request waits for, sorted, and how many tokens vLLM had."""
    relay.forget()
    answer = engine.ask(ask)
    engine.worker_connector.unregister_kv_caches()  # which waits for copies
    time.sleep(0.1)
    return sorted(set(relay.names()) - {"DONE tickets"}), answer.num_cached


@pytest.mark.smoke
def test_no_question_is_asked_in_vain(
    world: World, relay: LateSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "QUICK_S", PATIENCE_S)
    with running_engine(world.options(lmcache_sidecar_socket=str(relay.path))) as engine:
        assert asked(engine, relay, Ask(prompt(500, 100))) == ([], 0)
        ask = Ask(prompt(501, 1000))
        assert asked(engine, relay, ask) == (["COMMIT", "RESERVE", "STAGE"], 0)
        assert asked(engine, relay, ask) == (["STAGE"], 896)  # vLLM has it itself
        engine.reset()
        assert asked(engine, relay, ask) == (["DONE", "LOAD", "STAGE"], 3 * CHUNK_SIZE)


def test_a_late_sidecar_is_not_asked_until_it_is_quick_again(
    world: World, sidecar: Service, relay: LateSocket
) -> None:
    found = Ask(prompt(510, 600))
    with running_engine(world.options(lmcache_sidecar_socket=str(relay.path), **HASTY)) as engine:
        eventually(lambda: is_found(engine, found), "nothing is found while the sidecar is quick")
        relay.late_s = LATE_S
        engine.ask(Ask(prompt(511, 600)))
        await_calm(sidecar)  # its store had begun before
        relay.forget()
        for number in range(512, 524):
            engine.ask(Ask(prompt(number, 600)))
        assert set(relay.names()) <= {"DONE tickets"}, (
            "the engine's loop waits for a sidecar that is late"
        )
        relay.late_s = 0.0
        eventually(lambda: is_found(engine, found), "the sidecar is quick again, and is not used")
