"""The link to a sidecar goes on trying, whatever becomes of an attempt."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.link import SidecarLink
from lmcache_core.wire import messages as m

from tests.fixtures.embedded import until
from tests.fixtures.frames import HELLO
from tests.fixtures.limits import without_threads
from tests.fixtures.scripted_sidecar import GENERATION, scripted_sidecar

PATIENCE_S = 60.0


def test_a_fault_that_nobody_foresaw_ends_one_attempt_and_not_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    num_failures = 2

    def greet(connection: SidecarConnection) -> None:
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise KeyError("greeting")

    link = SidecarLink(tmp_path / "s.sock", HELLO, 5.0, greet)
    link.open()
    try:
        with scripted_sidecar(tmp_path, lambda request: None) as sidecar:
            until(lambda: link.connection, "the link has given up")
            assert sidecar.num_connections == 3
            until(lambda: sidecar.num_ended == 2, "a connection that was not greeted stays open")
            assert [fault.exc_type for fault in seen] == [KeyError, KeyError]
            assert caplog.text.count("sidecar failed: error=KeyError('greeting')") == 2
    finally:
        link.close()


def test_a_connection_that_is_lost_before_it_is_visible_is_replaced(tmp_path: Path) -> None:
    """It is probed before: its first answer was late."""
    greeted: list[SidecarConnection] = []

    def greet(connection: SidecarConnection) -> None:
        greeted.append(connection)
        if len(greeted) == 1:
            connection.give_up("the sidecar is gone")

    with scripted_sidecar(tmp_path, lambda request: None):
        link = SidecarLink(tmp_path / "s.sock", HELLO, 5.0, greet)
        link.open()
        try:
            until(lambda: link.connection, "the link has given up")
            assert link.connection is greeted[1]
        finally:
            link.close()


def test_a_process_without_descriptors_to_spare_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No socket can be made just then: neither the start of the engine nor the link suffers."""
    made = socket.socket
    num_refused = 0

    def refuse(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_refused
        if num_refused < 2 and args[:1] == (socket.AF_UNIX,):
            num_refused += 1
            raise OSError(24, "Too many open files")
        return made(*args, **kwargs)

    with scripted_sidecar(tmp_path, lambda request: None):
        monkeypatch.setattr("lmcache_core.sidecar.connection.socket.socket", refuse)
        link = SidecarLink(tmp_path / "s.sock", HELLO, 5.0, lambda connection: None)
        link.open()
        try:
            assert num_refused == 1
            until(lambda: link.connection, "the link has given up")
            assert num_refused == 2
        finally:
            link.close()


def test_a_sidecar_that_answers_and_cannot_be_used_is_told_of_once_for_each_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its socket is found, and it looks healthy; but the lock of its generation has been
    removed, or its layout is another one.
    """
    generation = GENERATION + 1
    refused: m.Message | None = None
    is_ready = threading.Event()

    def script(request: m.Message) -> m.Message:
        is_ready.wait(PATIENCE_S)
        return refused or sidecar.welcome(generation=generation)

    def num_complaints() -> int:
        return caplog.text.count("answers but is unusable")

    link = SidecarLink(tmp_path / "s.sock", HELLO, 5.0, lambda connection: None)
    link.open()
    try:
        assert num_complaints() == 0, "nobody is there"
        with scripted_sidecar(tmp_path, script) as sidecar:
            is_ready.set()
            until(lambda: num_complaints() == 1, "nothing tells why it is not used")
            assert "engines must see the sidecar's arena_path" in caplog.text
            tried = sidecar.num_connections
            until(lambda: sidecar.num_connections > tried, "it has given up")
            refused = m.ErrorMessage("layout", "another one")
            until(lambda: num_complaints() == 2, "nothing tells why it is not used")
            refused, generation = None, GENERATION
            until(lambda: link.connection, "it has given up")
            assert num_complaints() == 2
    finally:
        link.close()


def test_a_process_that_may_start_no_thread_tries_again(tmp_path: Path) -> None:
    """No call of the engine fails for it."""
    with scripted_sidecar(tmp_path, lambda request: None):
        link = SidecarLink(tmp_path / "s.sock", HELLO, 5.0, lambda connection: None)
        link.open()
        try:
            connection = link.connection
            assert connection is not None
            with without_threads():
                connection.give_up("the sidecar is gone")
                assert link.connection is None
            until(lambda: link.connection, "the link has given up")
            with without_threads():
                connection.give_up("the sidecar is gone")
        finally:
            link.close()


def test_a_link_that_could_start_no_thread_closes(tmp_path: Path) -> None:
    link = SidecarLink(tmp_path / "s.sock", HELLO, 5.0, lambda connection: None)
    with without_threads():
        link.open()
        assert link.connection is None
        link.close()
