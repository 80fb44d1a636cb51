"""The link to a sidecar keeps trying, whatever ends an attempt."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.link import SidecarLink
from lmcache_core.wire import messages as m

from tests.fixtures.frames import HELLO
from tests.fixtures.limits import without_threads
from tests.fixtures.scripted_sidecar import GENERATION, PATIENCE_S, scripted_sidecar
from tests.fixtures.waiting import wait_until


@contextlib.contextmanager
def linked(
    directory: Path, greet: Callable[[SidecarConnection], None] = lambda connection: None
) -> Iterator[SidecarLink]:
    link = SidecarLink(directory / "s.sock", HELLO, PATIENCE_S, greet)
    link.open()
    try:
        yield link
    finally:
        link.close()


def test_unforeseen_fault_ends_one_attempt_and_not_the_link(
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

    with (
        linked(tmp_path, greet) as link,
        scripted_sidecar(tmp_path, lambda request: None) as sidecar,
    ):
        wait_until(lambda: link.connection)
        assert sidecar.num_connections == 3
        wait_until(lambda: sidecar.num_ended == 2)
        assert [fault.exc_type for fault in seen] == [KeyError, KeyError]
        assert caplog.text.count("sidecar failed: error=KeyError('greeting')") == 2


def test_connection_that_is_lost_before_it_is_visible_is_replaced(tmp_path: Path) -> None:
    """It is probed before: its first answer was late."""
    greeted: list[SidecarConnection] = []

    def greet(connection: SidecarConnection) -> None:
        greeted.append(connection)
        if len(greeted) == 1:
            connection.give_up("the sidecar is gone")

    with scripted_sidecar(tmp_path, lambda request: None), linked(tmp_path, greet) as link:
        wait_until(lambda: link.connection)
        assert link.connection is greeted[1]


def test_process_without_descriptors_tries_again(
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
        with linked(tmp_path) as link:
            assert num_refused == 1
            wait_until(lambda: link.connection)
            assert num_refused == 2


def test_unusable_sidecar_is_logged_once_for_each_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks healthy; but the lock of its generation has been removed, or its layout is
    another one.
    """
    generation = GENERATION + 1
    refused: m.Message | None = None
    is_ready = threading.Event()

    def script(request: m.Message) -> m.Message:
        is_ready.wait(PATIENCE_S)
        return refused or sidecar.welcome(generation=generation)

    def num_complaints() -> int:
        return caplog.text.count("answers but is unusable")

    with linked(tmp_path) as link:
        assert num_complaints() == 0
        with scripted_sidecar(tmp_path, script) as sidecar:
            is_ready.set()
            wait_until(lambda: num_complaints() == 1)
            assert "engines must see the sidecar's arena_path" in caplog.text
            tried = sidecar.num_connections
            wait_until(lambda: sidecar.num_connections > tried)
            refused = m.ErrorMessage("layout", "another one")
            wait_until(lambda: num_complaints() == 2)
            refused, generation = None, GENERATION
            wait_until(lambda: link.connection)
            assert num_complaints() == 2


def test_process_without_threads_tries_again(tmp_path: Path) -> None:
    """No call of the engine fails for it."""
    with scripted_sidecar(tmp_path, lambda request: None), linked(tmp_path) as link:
        connection = link.connection
        assert connection is not None
        with without_threads():
            connection.give_up("the sidecar is gone")
            assert link.connection is None
        wait_until(lambda: link.connection)
        with without_threads():
            connection.give_up("the sidecar is gone")
