"""What the connector asks of a sidecar, and of one that answers late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from lmcache_core.integrations.vllm.scheduler import WINDOW_TICKET
from lmcache_core.sidecar import connection as client_connection
from lmcache_core.wire import messages as m

from tests.fixtures.late_socket import LateSocket, late_socket, name_of
from tests.fixtures.sidecar import RunningSocket, running_socket
from tests.fixtures.vllm_engine import FULL, Engine, Limits, Shape, running, window
from tests.fixtures.vllm_engine.worlds import prompt, with_sidecar
from tests.fixtures.waiting import wait_until

HASTY = {"prefill_tokens_per_s": 1e6}
"""A hit saves next to nothing: what is waited for is waited for too long."""
LATE_S = 0.05
PATIENCE_S = 60.0


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[RunningSocket]:
    with running_socket(tmp_path, arena_bytes=5 << 20) as running:
        yield running


@pytest.fixture
def relay(sidecar: RunningSocket, tmp_path: Path) -> Iterator[LateSocket]:
    with late_socket(tmp_path / "late.sock", sidecar.path) as relay:
        yield relay


def asked(engine: Engine, relay: LateSocket, tokens: list[int], *expected: str) -> int:
    """Run one request, check what it asks of the sidecar, and return how many tokens were loaded.

    A ticket is given back at most once.
    """
    begin = len(relay.requests)
    request = engine.ask(tokens, 2)
    engine.settle()

    def names() -> list[str]:
        found = map(name_of, relay.requests[begin:])
        return sorted(name for name in found if name not in ("DONE tickets", "PING"))

    wait_until(lambda: len(names()) >= len(expected))
    assert names() == list(expected)
    given_back = [
        ticket for said in relay.requests if isinstance(said, m.DoneWith) for ticket in said.tickets
    ]
    assert len(given_back) == len(set(given_back))
    assert {ticket.removesuffix(WINDOW_TICKET) for ticket in given_back} <= {
        said.ticket for said in relay.requests if isinstance(said, m.Stage)
    }
    return engine.tally(request).num_external


def test_no_question_is_asked_in_vain(
    any_module: ModuleType, model: Path, relay: LateSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a busy machine delays an answer for so long that it is not waited for.
    monkeypatch.setattr(client_connection, "QUICK_S", PATIENCE_S)
    with running(any_module, model, with_sidecar(relay.path), limits=Limits(64)) as engine:
        assert asked(engine, relay, prompt(1, 7)) == 0, "less than a chunk"
        assert asked(engine, relay, prompt(1, 43), "COMMIT", "RESERVE", "STAGE") == 0
        engine.forget()
        assert asked(engine, relay, prompt(1, 43), "DONE", "LOAD", "STAGE") == 40
        assert asked(engine, relay, prompt(1, 43), "STAGE") == 0, "vLLM has it itself"
        wait_until(lambda: "DONE tickets" in relay.names())
        engine.forget()


def test_a_hybrid_gives_its_tickets_back_once(
    module: ModuleType, model: Path, relay: LateSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "QUICK_S", PATIENCE_S)
    shape = Shape((FULL, window(6)), num_blocks=96)
    with running(module, model, with_sidecar(relay.path), shape=shape, limits=Limits(64)) as engine:
        engine.ask(prompt(1, 43), 2)
        engine.settle()
        engine.forget()
        relay.forget()
        # For the whole prompt, and for its window.
        assert (
            asked(engine, relay, prompt(1, 43), "DONE", "DONE", "LOAD", "LOAD", "STAGE", "STAGE")
            > 0
        )
        engine.forget()


def test_a_late_sidecar_is_not_asked_until_it_is_quick_again(
    any_module: ModuleType, model: Path, relay: LateSocket
) -> None:
    """Every answer comes, so no connection is lost; but no step may wait for one."""
    with running(any_module, model, with_sidecar(relay.path, **HASTY), limits=Limits(64)) as engine:
        wait_until(lambda: found(engine, 1))
        num_connections = relay.num_accepted
        relay.late_s = LATE_S
        engine.ask(prompt(2, 43), 2)
        relay.forget()
        for number in range(3, 23):
            engine.ask(prompt(number, 43), 2)
            engine.forget()
        assert set(relay.names()) <= {"DONE tickets"}
        relay.late_s = 0.0
        wait_until(lambda: found(engine, 1))
        wait_until(lambda: found(engine, 30))
        assert relay.num_accepted == num_connections, "the connections were good"


def test_a_new_engine_connects_before_its_first_request(
    any_module: ModuleType, model: Path, sidecar: RunningSocket, tmp_path: Path
) -> None:
    """It connects while it starts, or as soon as there is a sidecar, without a request."""
    with running(any_module, model, with_sidecar(sidecar.path), limits=Limits(64)) as engine:
        engine.ask(prompt(1, 43), 2)
        engine.forget()
    for comes_late in (False, True):
        path = tmp_path / f"{comes_late}.sock"
        with contextlib.ExitStack() as stack:
            early = None if comes_late else stack.enter_context(late_socket(path, sidecar.path))
            with running(any_module, model, with_sidecar(path), limits=Limits(64)) as engine:
                relay = early or stack.enter_context(late_socket(path, sidecar.path))
                wait_until(lambda relay=relay: relay.names().count("HELLO") == 3)
                wait_until(lambda engine=engine: found(engine, 1))


def found(engine: Engine, number: int) -> bool:
    """Whether a prompt is found; it is computed, and stored, if it is not."""
    request = engine.ask(prompt(number, 43), 2)
    engine.forget()
    return engine.tally(request).num_external >= 39
