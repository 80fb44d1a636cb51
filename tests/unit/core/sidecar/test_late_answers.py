"""Answers that come late: they are not waited for beyond what they can save, and end no
connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Staged
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.sidecar import connection as connection_module
from lmcache_core.sidecar.connection import (
    MAX_UNANSWERED,
    QUICK_S,
    Question,
    SidecarConnection,
)
from lmcache_core.sidecar.store import CALL_MARGIN_S
from lmcache_core.telemetry import Counters
from lmcache_core.wire import messages as m

from tests.fixtures.chains import chain_of, keys_by_chunk
from tests.fixtures.embedded import until
from tests.fixtures.frames import HELLO
from tests.fixtures.scripted_sidecar import (
    UNHURRIED_S,
    Answer,
    ScriptedSidecar,
    scripted_sidecar,
)

CHAINS = [chain_of(range(3))]
GOOD = Staged(True, (b"\1\1\0",))
MUCH_S = 1000.0
TIMEOUT_S = 5.0
PATIENCE_S = 60.0


class Held:
    """Answers nothing but HELLO until `go` is set."""

    def __init__(self, sidecar: ScriptedSidecar) -> None:
        self.go = threading.Event()
        self._sidecar = sidecar

    def __call__(self, request: m.Message) -> Answer:
        if isinstance(request, m.Hello):
            return self._sidecar.welcome()
        self.go.wait(PATIENCE_S)
        match request:
            case m.Stage():
                return m.Promise(*GOOD)
            case m.DoneWith():
                return m.Ok()
            case m.Lookup():
                return m.ContainsOk([True])
        return m.Pong()


@contextlib.contextmanager
def held(
    directory: Path, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[SidecarChunkStore, ScriptedSidecar, threading.Event]]:
    with scripted_sidecar(directory, lambda request: None) as sidecar:
        sidecar.script = script = Held(sidecar)
        store = SidecarChunkStore(sidecar.path, HELLO, timeout_s, Counters())
        store.open(lambda salt: None)
        try:
            yield store, sidecar, script.go
        finally:
            script.go.set()
            store.close()


def asked(sidecar: ScriptedSidecar) -> list[str]:
    names = [request.frame_type.name for request in sidecar.requests]
    return [name for name in names if name != "PING"]


def test_a_question_waits_for_its_turn_on_the_connection(tmp_path: Path) -> None:
    """A lookup that gave up behind a late answer would miss stored chunks."""
    with held(tmp_path) as (store, _, go), ThreadPoolExecutor(2) as pool:
        keys = [keys_by_chunk(chain_of([number])) for number in range(2)]
        found = [pool.submit(store.contains, key) for key in keys]
        time.sleep(2 * CALL_MARGIN_S)
        go.set()
        assert [answer.result(PATIENCE_S) for answer in found] == [[True], [True]]


def test_what_can_save_much_is_waited_for_and_asked_once(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, go):
        for _ in range(20):
            assert store.stage("t", CHAINS, wait_s=0.001, saving_s=MUCH_S) == Staged(False, ())
        go.set()
        until(
            lambda: store.stage("t", CHAINS, wait_s=0.001, saving_s=MUCH_S) == GOOD,
            "the answer is lost",
        )
        assert asked(sidecar) == ["HELLO", "STAGE"]
        assert sidecar.num_connections == 1


def test_what_can_save_little_is_done_without_until_the_sidecar_is_quick(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, go):
        assert store.stage("t", CHAINS, wait_s=0.0) == Staged(False, ())
        until(lambda: store.stage("t", CHAINS, wait_s=0.0) is None, "it waits without end")
        assert not store.is_worth(0.0)
        assert store.is_worth(MUCH_S)
        for number in range(100):
            assert store.stage(f"t{number}", CHAINS, wait_s=0.0) is None
            store.unstage([f"t{number}"])
        assert asked(sidecar).count("STAGE") == 1
        go.set()
        until(lambda: store.is_worth(0.0), "nothing finds out that the sidecar is quick again")
        until(
            lambda: store.stage("u", CHAINS, wait_s=PATIENCE_S, saving_s=MUCH_S) == GOOD,
            "it is not asked again",
        )
        assert sidecar.num_connections == 1, "an answer that came late has cost a connection"


def test_a_sidecar_that_never_answers_is_given_up_in_the_background(tmp_path: Path) -> None:
    with held(tmp_path, timeout_s=0.2) as (store, sidecar, go):
        assert store.stage("t", CHAINS, wait_s=0.0) == Staged(False, ())
        until(lambda: store.stage("t", CHAINS, wait_s=0.0) is None, "it waits without end")
        until(lambda: sidecar.num_connections > 1, "the connection is kept for ever")
        go.set()
        until(
            lambda: store.stage("u", CHAINS, wait_s=PATIENCE_S, saving_s=MUCH_S) == GOOD,
            "it is not asked again",
        )


@pytest.mark.parametrize(
    ("num_chunks", "num_before", "num_after"),
    [(4000, 0, 6), (3, MAX_UNANSWERED - 1, 0)],
    ids=["bytes", "requests"],
)
def test_a_sidecar_that_hangs_is_given_up_although_nothing_more_can_be_sent(
    tmp_path: Path, num_chunks: int, num_before: int, num_after: int
) -> None:
    """The socket's buffer is full, or too many answers are missing: the probe cannot be sent
    either.
    """
    chains = [chain_of(range(num_chunks))]
    with held(tmp_path, timeout_s=0.2) as (store, sidecar, _):
        for number in range(num_before):
            store.unstage([f"u{number}"])
        for number in range(num_after):
            store.stage(f"t{number}", chains, wait_s=0.0, saving_s=MUCH_S)

        def is_given_up() -> bool:
            store.stage("t", chains, wait_s=0.0, saving_s=MUCH_S)
            return sidecar.num_connections > 1

        until(is_given_up, "the connection is kept for ever")


def test_a_full_socket_is_noticed_although_its_questions_were_dropped(tmp_path: Path) -> None:
    """Their answers are no longer fetched. Later requests must not wait for room in the socket."""
    with held(tmp_path) as (store, sidecar, _):
        for number in range(MAX_UNANSWERED + 1):
            store.unstage([f"t{number}"])
        until(
            lambda: not store.stage("t", CHAINS, wait_s=0.0) and not store.is_worth(0.0),
            "it counts as quick",
        )
        assert store.is_worth(MUCH_S), "an answer may only not have been read"
        assert "STAGE" not in asked(sidecar)


def test_a_probe_that_could_not_be_sent_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has its turn just then. The sidecar is as late as before, and is probed
    again.
    """
    with held(tmp_path) as (store, _, go):
        connection = store._link.connection
        assert connection is not None
        probe = connection.probe
        probes: list[float] = []

        def counted() -> float:
            took_s = probe()
            probes.append(took_s)
            return took_s

        monkeypatch.setattr(connection, "probe", counted)
        with connection._turn:
            connection.wasted(2 * UNHURRIED_S)
            until(lambda: probes, "it is not probed")
            time.sleep(0.05)
            assert not store.is_worth(0.0), "nothing has been answered"
        go.set()
        until(lambda: store.is_worth(0.0), "nothing finds out that the sidecar is quick")


def test_a_ticket_is_given_back_before_it_is_asked_for_again(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, go):
        go.set()
        for _ in range(3):
            until(
                lambda: store.stage("t", CHAINS, wait_s=PATIENCE_S, saving_s=MUCH_S) == GOOD,
                "no answer",
            )
            store.unstage(["t"])
        until(lambda: len(asked(sidecar)) == 7, "not all was said")
        assert asked(sidecar)[1:] == ["STAGE", "DONE"] * 3


def test_a_ticket_that_was_given_back_to_a_late_sidecar_is_told_before_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    """Nothing is sent to give it back while the sidecar is late; the order counts all the same."""
    with held(tmp_path) as (store, sidecar, go):
        assert store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S) == Staged(False, ())
        until(
            lambda: (
                store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S) and not store.is_worth(0.0)
            ),
            "it is not late",
        )
        store.unstage(["t"])
        assert store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S) == Staged(False, ())
        go.set()
        until(
            lambda: store.stage("t", CHAINS, wait_s=0.001, saving_s=MUCH_S) == GOOD,
            "the answer is lost",
        )
        assert asked(sidecar) == ["HELLO", "STAGE", "DONE", "STAGE"]


def test_other_chains_under_a_ticket_are_another_question(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, go):
        assert store.stage("t", [chain_of(range(2))], wait_s=0.0, saving_s=MUCH_S) == Staged(
            False, ()
        )
        assert store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S) == Staged(False, ())
        go.set()
        until(lambda: asked(sidecar).count("STAGE") == 2, "it was not asked")


def test_requests_without_answers_are_bounded_and_nothing_waits_for_them(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, go):
        begin = time.monotonic()
        for number in range(4 * MAX_UNANSWERED):
            store.unstage([f"t{number}"])
        assert time.monotonic() - begin < PATIENCE_S / 2
        assert store._link.connection is not None
        go.set()
        said: set[str] = set()

        def is_said() -> bool:
            store.unstage(["last"])
            said.update(
                ticket
                for request in list(sidecar.requests)
                if isinstance(request, m.DoneWith)
                for ticket in request.tickets
            )
            return len(said) == 4 * MAX_UNANSWERED + 1

        until(is_said, "tickets that could not be given back at once are forgotten")


def test_a_sidecar_that_ends_while_many_answers_are_missing_is_noticed(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, _):
        sidecar.script = lambda request: None  # it reads, and answers HELLO alone
        until(
            lambda: store.unstage(["t"]) or len(sidecar.requests) > MAX_UNANSWERED,
            "it does not read",
        )
        for connection in list(sidecar._connections):
            connection.shutdown(socket.SHUT_RDWR)
        until(
            lambda: store.unstage(["t"]) or sidecar.num_connections > 1,
            "a connection that has ended is used for ever",
        )


def test_an_answer_may_come_in_pieces(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, _):

        def script(request: m.Message) -> Answer:
            if not isinstance(request, m.Stage):
                return m.Pong()
            pieces = m.build_frame(sidecar.last_id, m.Promise(*GOOD))
            for at in range(len(pieces) - 1):
                sidecar._connections[-1].sendall(pieces[at : at + 1])
                time.sleep(0.002)
            return pieces[-1:]

        sidecar.script = script
        until(
            lambda: store.stage("t", CHAINS, wait_s=0.001, saving_s=MUCH_S) == GOOD,
            "pieces are lost",
        )
        assert asked(sidecar) == ["HELLO", "STAGE"]


@contextlib.contextmanager
def probed(directory: Path, *answers_s: float) -> Iterator[tuple[SidecarConnection, list[float]]]:
    """A connection whose probes take that long, the last one again and again; when they began."""
    began: list[float] = []

    def probe() -> float:
        began.append(time.monotonic())
        return answers_s[min(len(began), len(answers_s)) - 1]

    with scripted_sidecar(directory, lambda request: None, QUICK_S) as sidecar:
        connection = SidecarConnection(sidecar.path, HELLO, TIMEOUT_S)
        connection.open()
        with mock.patch.object(connection, "probe", probe):
            yield connection, began
            connection.close()
            connection.join()


def test_a_wait_for_nothing_is_followed_by_a_rest(tmp_path: Path) -> None:
    """A sidecar that is quick when it is probed, and late when it matters, may not cost more
    than a few percent.
    """
    with probed(tmp_path, 0.0) as (connection, began):
        begin = time.monotonic()
        connection.wasted(0.01)
        assert not connection.is_worth(0.0)
        until(lambda: connection.is_worth(0.0), "it rests for ever")
        assert began[0] - begin >= 0.2
        connection.took(2 * QUICK_S)
        until(
            lambda: len(began) == 2 and connection.is_worth(0.0),
            "one answer that came late is held against it",
        )
        connection.close()
        connection.took(1.0)
    assert len(began) == 2, "a closed connection is probed"


def test_an_answer_that_took_very_long_is_not_held_against_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own start may have held up the thread that waited for it."""
    monkeypatch.setattr(connection_module, "PROBE_S", MUCH_S)
    with probed(tmp_path, MUCH_S, 0.0) as (connection, _):
        connection.took(2 * QUICK_S)
        until(lambda: connection.is_worth(0.0), "it waits before it asks again")


def test_an_answer_is_timed_when_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may read it along with its own; the probing thread looks later."""
    with held(tmp_path) as (store, _, go):
        go.set()
        connection = store._link.connection
        assert connection is not None
        await_answer = connection.await_answer

        def noticed_late(question: Question[m.Pong], timeout_s: float) -> m.Pong | None:
            answer = await_answer(question, timeout_s)
            time.sleep(1.0)
            return answer

        monkeypatch.setattr(connection, "await_answer", noticed_late)
        assert connection.probe() < 0.9


def test_the_error_names_the_request_and_its_deadline(tmp_path: Path) -> None:
    with scripted_sidecar(tmp_path, lambda request: b"") as sidecar:
        connection = SidecarConnection(sidecar.path, HELLO, 0.1)
        with pytest.raises(UnavailableError, match=r"no answer to HELLO within 0.1 s"):
            connection.open()
    assert not connection.is_open


def test_a_connection_is_measured_when_it_is_made(tmp_path: Path) -> None:
    """Also by a client that has nothing to describe; and a probe in its thread finds the
    connection.
    """
    with scripted_sidecar(tmp_path, lambda request: None, QUICK_S) as sidecar:

        def script(request: m.Message) -> Answer:
            if isinstance(request, m.Hello):
                time.sleep(0.1)
                return sidecar.welcome()
            may_answer.wait(PATIENCE_S)
            return m.Pong()

        may_answer = threading.Event()
        sidecar.script = script
        store = SidecarChunkStore(sidecar.path, HELLO, TIMEOUT_S, Counters())
        store.open(lambda salt: None)
        try:
            until(
                lambda: m.Ping() in sidecar.requests,
                "nothing finds out whether it is still late",
            )
            assert not store.is_worth(0.0)
            assert store.is_worth(MUCH_S)
            may_answer.set()
            until(lambda: store.is_worth(0.0), "it is held against it for ever")
        finally:
            may_answer.set()
            store.close()


def test_a_rest_may_begin_while_a_probe_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe waits for the same answer as the caller, whose patience ends first."""
    is_probing, may_answer = threading.Event(), threading.Event()

    def probe() -> float:
        is_probing.set()
        may_answer.wait(PATIENCE_S)
        return 0.0

    with probed(tmp_path, 0.0) as (connection, _):
        monkeypatch.setattr(connection, "probe", probe)
        connection.took(2 * QUICK_S)
        assert is_probing.wait(PATIENCE_S)
        begin = time.monotonic()
        connection.wasted(0.02)
        may_answer.set()
        until(lambda: connection.is_worth(0.0), "it rests for ever")
        assert time.monotonic() - begin >= 0.4
