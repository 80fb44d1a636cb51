"""Late answers: they are not waited for beyond what they can save, and end no connection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Staged
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.sidecar import connection as connection_module
from lmcache_core.sidecar.connection import MAX_UNANSWERED, QUICK_S, Question, SidecarConnection
from lmcache_core.sidecar.store import CALL_MARGIN_S
from lmcache_core.wire import messages as m

from tests.fixtures.chains import chain_of, keys_by_chunk
from tests.fixtures.frames import HELLO
from tests.fixtures.held_clock import HeldClock
from tests.fixtures.scripted_sidecar import (
    PATIENCE_S,
    Answer,
    ScriptedSidecar,
    scripted_sidecar,
    store_at,
)
from tests.fixtures.waiting import wait_until

CHAINS = [chain_of(range(3))]
GOOD, UNKNOWN = Staged(True, (b"\1\1\0",)), Staged(False, ())
MUCH_S = 1000.0
BUFFERED = 32
"""Requests that a socket holds until they are read."""


class Held:
    """Answers only HELLO until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, request: m.Message) -> Answer:
        if isinstance(request, m.Hello):
            return None
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
    directory: Path, timeout_s: float = PATIENCE_S
) -> Iterator[tuple[SidecarChunkStore, ScriptedSidecar, threading.Event]]:
    with scripted_sidecar(directory, lambda request: None) as sidecar:
        sidecar.script = script = Held()
        with store_at(sidecar.path, timeout_s) as store:
            try:
                yield store, sidecar, script.go
            finally:
                script.go.set()


@contextlib.contextmanager
def connected(sidecar: ScriptedSidecar) -> Iterator[SidecarConnection]:
    connection = SidecarConnection(sidecar.path, HELLO, PATIENCE_S)
    connection.open()
    try:
        yield connection
    finally:
        connection.close()
        connection.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    """That of connections."""
    one = HeldClock()
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=one))
    return one


def is_good(store: SidecarChunkStore, ticket: str) -> bool:
    return store.stage(ticket, CHAINS, wait_s=0.001, saving_s=MUCH_S) == GOOD


def wait_for_more(items: Sized, count: int = 1) -> None:
    before = len(items)
    wait_until(lambda: len(items) >= before + count)


def wait_until_read(sidecar: ScriptedSidecar, count: int) -> None:
    """Wait until the sidecar has read as many requests after HELLO."""
    wait_until(lambda: len(sidecar.requests) > count)


def asked(sidecar: ScriptedSidecar) -> list[str]:
    names = [request.frame_type.name for request in sidecar.requests]
    return [name for name in names if name != "PING"]


def test_question_waits_for_its_turn_on_the_connection(tmp_path: Path) -> None:
    """A lookup that gave up after a late answer would miss stored chunks."""
    with held(tmp_path) as (store, _, go), ThreadPoolExecutor(2) as pool:
        keys = [keys_by_chunk(chain_of([number])) for number in range(2)]
        found = [pool.submit(store.contains, key) for key in keys]
        with pytest.raises(TimeoutError):
            found[1].result(2 * CALL_MARGIN_S)
        go.set()
        assert [answer.result(PATIENCE_S) for answer in found] == [[True], [True]]


def test_sidecar_that_never_answers_is_given_up_in_the_background(tmp_path: Path) -> None:
    with held(tmp_path, timeout_s=0.2) as (store, sidecar, go):
        assert store.stage("t", CHAINS, wait_s=0.0) == UNKNOWN
        wait_until(lambda: store.stage("t", CHAINS, wait_s=0.0) is None)
        wait_until(lambda: sidecar.num_connections > 1)
        go.set()
        wait_until(lambda: is_good(store, "u"))


@pytest.mark.parametrize(
    ("num_chunks", "num_before", "num_after"),
    [(4000, 0, 6), (3, MAX_UNANSWERED - 1, 0)],
    ids=["bytes", "requests"],
)
def test_hanging_sidecar_is_given_up_although_nothing_more_can_be_sent(
    tmp_path: Path, num_chunks: int, num_before: int, num_after: int
) -> None:
    """The socket's buffer is full, or too many answers are missing: a probe cannot be sent,
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

        wait_until(is_given_up)


def test_ticket_is_given_back_before_it_is_asked_for_again(tmp_path: Path) -> None:
    """Also to a late sidecar, to which it is not sent at once."""
    with held(tmp_path) as (store, sidecar, go):
        assert store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S) == UNKNOWN

        def is_late() -> bool:
            store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S)
            return not store.is_worth(0.0)

        wait_until(is_late)
        store.unstage(["t"])
        assert store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S) == UNKNOWN
        go.set()
        wait_until(lambda: is_good(store, "t"))
        wait_until(lambda: store.is_worth(0.0))
        store.unstage(["t"])
        wait_until(lambda: is_good(store, "t"))
        assert asked(sidecar) == ["HELLO", *["STAGE", "DONE"] * 2, "STAGE"]


def test_ticket_is_given_back_to_a_late_sidecar_without_another_question(tmp_path: Path) -> None:
    """The engine may be idle from now on: what the sidecar keeps for the ticket would stay held."""
    with held(tmp_path) as (store, sidecar, go):
        assert store.stage("t", CHAINS, wait_s=0.0, saving_s=MUCH_S) == UNKNOWN
        wait_until(lambda: store.stage("t", CHAINS, wait_s=0.0, saving_s=0.0) is None)
        store.unstage(["t"])
        go.set()
        wait_until(lambda: asked(sidecar) == ["HELLO", "STAGE", "DONE"])


def test_ticket_that_cannot_be_given_back_at_once_is_given_back_later(tmp_path: Path) -> None:
    """Too many answers are missing; the sidecar has been quick so far."""
    with held(tmp_path) as (store, sidecar, go):
        tickets = [f"t{number}" for number in range(MAX_UNANSWERED + 1)]
        for ticket in tickets:
            store.unstage([ticket])
        go.set()

        def are_given_back() -> bool:
            done = [said for said in list(sidecar.requests) if isinstance(said, m.DoneWith)]
            return [ticket for said in done for ticket in said.tickets] == tickets

        wait_until(are_given_back)


def test_unanswered_requests_are_bounded_and_nothing_waits_for_them(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, go):
        tickets = {f"t{number}" for number in range(4 * MAX_UNANSWERED)}
        for ticket in tickets:
            store.unstage([ticket])
        assert sidecar.num_connections == 1
        go.set()

        def are_given_back() -> bool:
            store.unstage(["last"])
            done = [said for said in list(sidecar.requests) if isinstance(said, m.DoneWith)]
            return tickets <= {ticket for said in done for ticket in said.tickets}

        wait_until(are_given_back)


def test_no_more_is_sent_to_a_sidecar_that_reads_without_answering(tmp_path: Path) -> None:
    with (
        scripted_sidecar(tmp_path, lambda request: None) as sidecar,
        connected(sidecar) as connection,
    ):
        for number in range(MAX_UNANSWERED):
            wait_until_read(sidecar, number - BUFFERED)
            connection.send(m.Ping(), m.Pong)
        with pytest.raises(UnavailableError, match="256 requests are unanswered"):
            connection.send(m.Ping(), m.Pong)


def test_sidecar_that_ends_while_many_answers_are_missing_is_noticed(tmp_path: Path) -> None:
    with (
        scripted_sidecar(tmp_path, lambda request: None, PATIENCE_S) as sidecar,
        store_at(sidecar.path) as store,
    ):
        for number in range(MAX_UNANSWERED):
            wait_until_read(sidecar, number - BUFFERED)
            store.unstage(["t"])
        wait_until_read(sidecar, MAX_UNANSWERED)
        sidecar.hang_up()
        wait_until(lambda: store.unstage(["t"]) or sidecar.num_connections > 1)


def test_wait_in_vain_is_followed_by_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: HeldClock
) -> None:
    """A sidecar that is quick when it is probed, and late when it matters, may not cost more than a
    few percent.
    """
    monkeypatch.setattr(connection_module, "PROBE_S", 0.01)
    with scripted_sidecar(tmp_path, lambda request: None, QUICK_S) as sidecar:
        with connected(sidecar) as connection:
            probes: list[float] = []
            monkeypatch.setattr(connection, "probe", lambda: probes.append(0.0) or 0.0)
            connection.wasted(0.01)
            wait_until(lambda: len(probes) > 2)
            clock.now_s += 0.19
            wait_for_more(probes, 2)
            assert not connection.is_worth(0.0), "it rests for 20 times as long"
            clock.now_s += 0.02
            wait_until(lambda: connection.is_worth(0.0))
            num_probes = len(probes)
            connection.took(2 * QUICK_S)
            wait_until(lambda: len(probes) > num_probes and connection.is_worth(0.0))
        num_probes = len(probes)
        connection.took(1.0)
        connection.join()
        assert len(probes) == num_probes, "a closed connection is probed"


def test_other_chains_under_a_ticket_are_another_question(tmp_path: Path) -> None:
    with held(tmp_path) as (store, sidecar, go):
        for chain in (chain_of(range(2)), *CHAINS):
            assert store.stage("t", [chain], wait_s=0.0, saving_s=MUCH_S) == UNKNOWN
        go.set()
        wait_until(lambda: asked(sidecar).count("STAGE") == 2)


def test_answer_may_come_in_pieces(tmp_path: Path) -> None:
    polls: list[bool] = []

    def is_whole() -> bool:
        polls.append(is_good(store, "t"))
        return polls[-1]

    with held(tmp_path) as (store, sidecar, _):

        def script(request: m.Message) -> Answer:
            if not isinstance(request, m.Stage):
                return m.Pong()
            frame = m.build_frame(sidecar.last_id, m.Promise(*GOOD))
            for piece in (frame[:1], frame[1:40], frame[40:-1]):
                sidecar.send(piece)
                wait_for_more(polls)
            return frame[-1:]

        sidecar.script = script
        wait_until(is_whole)
        assert asked(sidecar) == ["HELLO", "STAGE"]


def test_answer_is_timed_when_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: HeldClock
) -> None:
    """Another thread may read it along with its own; the probing thread looks later."""
    with scripted_sidecar(tmp_path, lambda request: None) as sidecar:
        sidecar.script = script = Held()
        script.go.set()
        with connected(sidecar) as connection:
            await_answer = connection.await_answer

            def noticed_late(question: Question[m.Pong], timeout_s: float) -> m.Pong | None:
                answer = await_answer(question, timeout_s)
                clock.now_s += 1.0
                return answer

            monkeypatch.setattr(connection, "await_answer", noticed_late)
            assert connection.probe() == 0.0


def test_connection_is_measured_when_it_is_made(tmp_path: Path, clock: HeldClock) -> None:
    """Also by a client that has nothing to describe; and a probe finds the connection."""
    may_answer = threading.Event()
    with scripted_sidecar(tmp_path, lambda request: None, QUICK_S) as sidecar:

        def script(request: m.Message) -> Answer:
            if isinstance(request, m.Hello):
                clock.now_s += 0.1
                return sidecar.welcome()
            may_answer.wait(PATIENCE_S)
            return m.Pong()

        sidecar.script = script
        with store_at(sidecar.path) as store:
            try:
                wait_until(lambda: m.Ping() in sidecar.requests)
                assert not store.is_worth(0.0)
                assert store.is_worth(MUCH_S)
                may_answer.set()
                wait_until(lambda: store.is_worth(0.0))
            finally:
                may_answer.set()
