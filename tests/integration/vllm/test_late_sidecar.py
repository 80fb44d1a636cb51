"""What the connector asks of a sidecar, and what it no longer asks of one that answers late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from lmcache_core.integrations.vllm.scheduler import WINDOW_TICKET
from lmcache_core.sidecar import connection as client_connection
from lmcache_core.wire import messages as m

from tests.fixtures.late_socket import LateSocket, late_socket, name_of
from tests.fixtures.sidecar import RunningSocket, running_socket
from tests.fixtures.vllm_engine import FULL, Engine, Limits, Shape, running, window
from tests.fixtures.vllm_engine.worlds import beside, prompt

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


def eventually(condition: Callable[[], object], complaint: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def asked(engine: Engine, relay: LateSocket, tokens: list[int]) -> tuple[list[str], int]:
    """The questions that one request waits for, sorted, and how many tokens were loaded for it.

    A ticket is given back once at most; while the machine is too busy for quick answers, with the
    next question.
    """
    begin = len(relay.requests)
    request = engine.ask(tokens, 2)
    time.sleep(0.05)
    given_back = [
        ticket for said in relay.requests if isinstance(said, m.DoneWith) for ticket in said.tickets
    ]
    assert len(given_back) == len(set(given_back))
    assert {ticket.removesuffix(WINDOW_TICKET) for ticket in given_back} <= {
        said.ticket for said in relay.requests if isinstance(said, m.Stage)
    }
    names = [
        name
        for name in map(name_of, relay.requests[begin:])
        if name not in ("DONE tickets", "PING")
    ]
    return sorted(names), engine.tally(request).num_external


def test_no_question_is_asked_in_vain(
    any_module: ModuleType,
    model: Path,
    relay: LateSocket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise a busy machine delays an answer for so long that it is not waited for.
    monkeypatch.setattr(client_connection, "QUICK_S", PATIENCE_S)
    with running(any_module, model, beside(relay.path), limits=Limits(64)) as engine:
        assert asked(engine, relay, prompt(1, 7)) == ([], 0), "less than a chunk"
        assert asked(engine, relay, prompt(1, 43)) == (["COMMIT", "RESERVE", "STAGE"], 0)
        engine.forget()
        assert asked(engine, relay, prompt(1, 43)) == (["DONE", "LOAD", "STAGE"], 40)
        assert asked(engine, relay, prompt(1, 43)) == (["STAGE"], 0), "vLLM has it itself"
        assert "DONE tickets" in relay.names()
        engine.forget()


def test_a_hybrid_gives_its_tickets_back_once(
    module: ModuleType, model: Path, relay: LateSocket
) -> None:
    shape = Shape((FULL, window(6)), num_blocks=96)
    with running(module, model, beside(relay.path), shape=shape, limits=Limits(64)) as engine:
        asked(engine, relay, prompt(1, 43))
        engine.forget()
        names, loaded = asked(engine, relay, prompt(1, 43))
        assert names.count("STAGE") == 2, "for the whole prompt, and for its window"
        assert loaded > 0
        engine.forget()


def test_a_late_sidecar_is_not_asked_until_it_is_quick_again(
    any_module: ModuleType, model: Path, relay: LateSocket
) -> None:
    """Every answer comes, so no connection is lost; but no step may wait for one."""
    with running(any_module, model, beside(relay.path, **HASTY), limits=Limits(64)) as engine:
        eventually(lambda: found(engine, 1), "nothing is found while the sidecar is quick")
        num_connections = relay.num_accepted
        relay.late_s = LATE_S
        engine.ask(prompt(2, 43), 2)
        relay.forget()
        for number in range(3, 23):
            engine.ask(prompt(number, 43), 2)
            engine.forget()
        assert set(relay.names()) <= {"DONE tickets"}, (
            "the engine's loop waits for a sidecar that is late"
        )
        relay.late_s = 0.0
        eventually(lambda: found(engine, 1), "the sidecar is quick again, and is not used")
        eventually(lambda: found(engine, 30), "the sidecar is quick again, and nothing is stored")
        assert relay.num_accepted == num_connections, "the connections were good"


def test_the_first_request_of_a_new_engine_finds_what_others_have_stored(
    any_module: ModuleType, model: Path, sidecar: RunningSocket, tmp_path: Path
) -> None:
    """It connects while it starts, or as soon as there is a sidecar: no request is needed for
    that.
    """
    with running(any_module, model, beside(sidecar.path), limits=Limits(64)) as engine:
        engine.ask(prompt(1, 43), 2)
        engine.forget()
    for comes_late in (False, True):
        path = tmp_path / f"{comes_late}.sock"
        with contextlib.ExitStack() as stack:
            early = None if comes_late else stack.enter_context(late_socket(path, sidecar.path))
            with running(any_module, model, beside(path), limits=Limits(64)) as engine:
                relay = early or stack.enter_context(late_socket(path, sidecar.path))
                eventually(
                    lambda: relay.num_accepted == 3,  # noqa: B023 (called at once)
                    "nothing connects before the first request",
                )
                eventually(lambda: relay.names().count("HELLO") == 3, "they say nothing")  # noqa: B023 (called at once)
                time.sleep(0.1)
                assert engine.tally(engine.ask(prompt(1, 43), 2)).num_external == 40
                engine.forget()


def found(engine: Engine, number: int) -> bool:
    """Whether a prompt is found; it is computed, and stored, if it is not."""
    request = engine.ask(prompt(number, 43), 2)
    engine.forget()
    return engine.tally(request).num_external >= 39
