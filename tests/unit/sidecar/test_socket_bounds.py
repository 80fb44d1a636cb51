"""What the clients of one socket may take of the sidecar together."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lmcache_core.sidecar import messages as m
from lmcache_sidecar import metrics
from lmcache_sidecar.socket import requests, server

from tests.fixtures.sidecar import RunningSocket, running_socket

HELLO = m.Hello(m.VERSION, m.VERSION, "test", 1, 0, "org/model", "layout")
LARGE = m.encode(m.Commit(tuple((number, bytes(60_000)) for number in range(10))))
"""A valid request of 600 kB."""


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def greeted(running: RunningSocket) -> Iterator[socket.socket]:
    """A raw connection that has said HELLO."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(5.0)
        raw.connect(str(running.path))
        raw.sendall(m.encode(HELLO))
        assert isinstance(answer_of(raw), m.HelloOk)
        yield raw


def answer_of(raw: socket.socket) -> m.Answer:
    (length,) = m.LENGTH.unpack(raw.recv(m.LENGTH.size, socket.MSG_WAITALL))
    return m.decode_answer(raw.recv(length, socket.MSG_WAITALL))


def taken_bytes(raw: socket.socket, data: bytes) -> int:
    """So much of it the other side takes off our hands while it takes anything at all."""
    raw.settimeout(0.1)
    num_sent = 0
    with contextlib.suppress(TimeoutError):
        while num_sent < len(data):
            num_sent += raw.send(data[num_sent : num_sent + (1 << 20)])
    raw.settimeout(5.0)
    return num_sent


def test_large_requests_of_many_clients_take_bounded_memory(tmp_path: Path) -> None:
    half = m.LENGTH.pack(m.MAX_MESSAGE_BYTES) + bytes(m.MAX_MESSAGE_BYTES // 2)
    with running_socket(tmp_path) as running, contextlib.ExitStack() as opened:
        clients = [opened.enter_context(greeted(running)) for _ in range(24)]
        taken = [taken_bytes(raw, half) for raw in clients]
        assert (
            sum(num == len(half) for num in taken)
            == requests.MAX_LARGE_REQUEST_BYTES // m.MAX_MESSAGE_BYTES
            == 8
        )
        assert max(num for num in taken if num < len(half)) < 1 << 20, (
            "the others keep what they have to say"
        )
        with greeted(running) as small:
            small.sendall(m.encode(m.Reserve((100,) * 100)))
            assert isinstance(answer_of(small), m.ReserveOk), "small ones go past"


def test_a_large_request_gets_its_turn_when_another_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_LARGE_REQUEST_BYTES", len(LARGE))
    with running_socket(tmp_path) as running, greeted(running) as first, greeted(running) as second:
        first.sendall(LARGE[:-1])
        wait_for(lambda: running.server._requests.large_bytes)
        assert taken_bytes(second, LARGE) < len(LARGE)
        first.sendall(LARGE[-1:])
        assert answer_of(first) == m.CommitOk((False,) * 10)
    assert running.server._requests.large_bytes == 0, "the one that went away waits no more"


def test_waiting_in_turn_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_LARGE_REQUEST_BYTES", len(LARGE))
    with running_socket(tmp_path) as running, greeted(running) as first, greeted(running) as second:
        first.sendall(LARGE[:-1])
        wait_for(lambda: running.server._requests.large_bytes)
        num_sent = taken_bytes(second, LARGE)
        first.close()
        second.sendall(LARGE[num_sent:])
        assert answer_of(second) == m.CommitOk((False,) * 10)


@pytest.mark.parametrize(
    ("max_bytes", "reason"), [(len(LARGE), metrics.NO_ROOM), (2 * len(LARGE), metrics.TOO_SLOW)]
)
def test_a_large_request_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, reason: str
) -> None:
    monkeypatch.setattr(requests, "MAX_LARGE_REQUEST_BYTES", max_bytes)
    with running_socket(tmp_path) as running, greeted(running) as first, greeted(running) as second:
        first.sendall(LARGE[:-1])
        wait_for(lambda: running.server._requests.large_bytes)
        monkeypatch.setattr(requests, "LARGE_REQUEST_TIMEOUT_S", 0.2)
        taken_bytes(second, LARGE[:-1])
        refusal = answer_of(second)
        assert isinstance(refusal, m.Refused)
        assert f"message of {len(LARGE) - 4} bytes" in refusal.message
        assert running.counters.value(metrics.REFUSED_CLIENTS_TOTAL, reason) == 1
        first.sendall(LARGE[-1:])
        assert answer_of(first) == m.CommitOk((False,) * 10), "its own time is not over"


def reserved_by(raw: socket.socket, sizes: tuple[int, ...]) -> list[int]:
    """Names of the reservations that were granted."""
    raw.sendall(m.encode(m.Reserve(sizes)))
    answer = answer_of(raw)
    assert isinstance(answer, m.ReserveOk)
    return [granted[0] for granted in answer.reservations if granted is not None]


def test_reservations_of_all_clients_leave_some_of_the_arena(tmp_path: Path) -> None:
    with running_socket(tmp_path, 1 << 20) as running, contextlib.ExitStack() as opened:
        clients = [opened.enter_context(greeted(running)) for _ in range(4)]
        granted = [len(reserved_by(raw, (64 << 10,) * 16)) for raw in clients]
        assert granted == [8, 4, 0, 0], "half of it each, three quarters together"
        assert running.counters.value(metrics.REFUSED_CHUNKS_TOTAL) == 4 * 16 - 12
        clients[0].close()
        wait_for(lambda: len(running.server.sessions) == 3)
        assert len(reserved_by(clients[2], (64 << 10,) * 16)) == 8, (
            "what a client leaves others may have"
        )


def test_what_is_given_back_or_refused_is_not_counted(tmp_path: Path) -> None:
    with running_socket(tmp_path, 1 << 20) as running, greeted(running) as raw:
        for _ in range(8):
            handles = reserved_by(raw, (1,) * 1100)
            assert len(handles) == 1024, "each takes 512 bytes"
            raw.sendall(m.encode(m.Abort(tuple(handles[:512]))))
            assert answer_of(raw) == m.AbortOk()
            raw.sendall(m.encode(m.Commit(tuple((handle, b"") for handle in handles[512:]))))
            assert answer_of(raw) == m.CommitOk((False,) * 512)


def test_one_client_more_than_there_may_be_is_turned_away_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MAX_CLIENTS", 2)
    with running_socket(tmp_path) as running, greeted(running), greeted(running):
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(5.0)
                raw.connect(str(running.path))
                assert raw.recv(1) == b""
        assert running.counters.value(metrics.REFUSED_CLIENTS_TOTAL, metrics.TOO_MANY) == 5
        assert caplog.text.count("turned away: 2 are connected") == 1, "not a line for each"


def test_clients_that_talk_nonsense_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_socket(tmp_path) as running:
        for _ in range(5):
            with greeted(running) as raw:
                raw.sendall(m.encode(HELLO))
                assert isinstance(answer_of(raw), m.Refused)
        assert caplog.text.count("is refused: HELLO comes first") == 1
