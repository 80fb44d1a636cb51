"""Bounds on what the clients of a socket may use together."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
from lmcache_core.wire import messages as m
from lmcache_core.wire.frames import (
    HEADER_BYTES,
    MAX_ARENA_META_BYTES,
    FrameHeader,
    FrameType,
    build_header,
)
from lmcache_sidecar import metrics
from lmcache_sidecar.socket import context, server, session

from tests.fixtures.embedded import PATIENCE_S, until
from tests.fixtures.frames import HELLO, RawClient, greeted
from tests.fixtures.sidecar import running_socket

LARGE = m.build_frame(2, m.Commit(tuple((number, bytes(60_000)) for number in range(10))))
"""A valid request of 600 kB."""
META_BYTES = len(LARGE) - HEADER_BYTES


def taken_bytes(raw: socket.socket, data: bytes) -> int:
    """How much of it the other side takes without a pause."""
    raw.settimeout(0.1)
    num_sent = 0
    with contextlib.suppress(TimeoutError):
        while num_sent < len(data):
            num_sent += raw.send(data[num_sent : num_sent + (1 << 20)])
    raw.settimeout(PATIENCE_S)
    return num_sent


def test_large_requests_of_many_clients_take_bounded_memory(tmp_path: Path) -> None:
    header = build_header(FrameHeader(FrameType.COMMIT, 2, MAX_ARENA_META_BYTES, 0))
    half = header + bytes(MAX_ARENA_META_BYTES // 2)
    most = context.MAX_LARGE_REQUEST_BYTES // MAX_ARENA_META_BYTES
    with running_socket(tmp_path) as running, contextlib.ExitStack() as opened:
        clients = [opened.enter_context(greeted(running.path)) for _ in range(24)]
        taken = [0] * len(clients)

        def send_more() -> bool:
            """Return whether as many requests as there is room for were taken."""
            for i, client in enumerate(clients):
                client.socket.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while taken[i] < len(half):
                        taken[i] += client.socket.send(half[taken[i] : taken[i] + (1 << 20)])
            return sum(num == len(half) for num in taken) >= most

        until(send_more)
        with greeted(running.path) as small:
            assert isinstance(small.say(m.ReserveExtents((100,) * 100)), m.Extents)
        send_more()
        assert sum(num == len(half) for num in taken) == most == 8
        assert max(num for num in taken if num < len(half)) < 1 << 20


def test_waiting_large_request_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_LARGE_REQUEST_BYTES", META_BYTES)
    with (
        running_socket(tmp_path) as running,
        greeted(running.path) as first,
        greeted(running.path) as second,
    ):
        first.socket.sendall(LARGE[:-1])
        until(lambda: running.server.context.large_requests.used_bytes)
        num_sent = taken_bytes(second.socket, LARGE)
        first.socket.close()
        second.socket.sendall(LARGE[num_sent:])
        assert second.answer() == m.ContainsOk([False] * 10)


@pytest.mark.parametrize(
    ("max_bytes", "reason"), [(META_BYTES, metrics.NO_ROOM), (2 * META_BYTES, metrics.TOO_SLOW)]
)
def test_wait_of_a_large_request_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, reason: str
) -> None:
    monkeypatch.setattr(context, "MAX_LARGE_REQUEST_BYTES", max_bytes)
    with (
        running_socket(tmp_path) as running,
        greeted(running.path) as first,
        greeted(running.path) as second,
    ):
        first.socket.sendall(LARGE[:-1])
        until(lambda: running.server.context.large_requests.used_bytes)
        monkeypatch.setattr(session, "LARGE_REQUEST_TIMEOUT_S", 0.2)
        taken_bytes(second.socket, LARGE[:-1])
        refusal = second.answer()
        assert isinstance(refusal, m.ErrorMessage)
        assert f"COMMIT of {META_BYTES} bytes" in refusal.message
        assert running.counters.value(metrics.REFUSED_CLIENTS_TOTAL, reason) == 1
        first.socket.sendall(LARGE[-1:])
        assert first.answer() == m.ContainsOk([False] * 10), "its own time is not over"


def reserved_by(client: RawClient, sizes: tuple[int, ...]) -> list[int]:
    """Ids of the extents that were granted."""
    answer = client.say(m.ReserveExtents(sizes))
    assert isinstance(answer, m.Extents)
    return [item.id for item in answer.items if isinstance(item, m.Extent)]


def test_reservations_of_all_clients_leave_some_of_the_arena(tmp_path: Path) -> None:
    with running_socket(tmp_path, 1 << 20) as running, contextlib.ExitStack() as opened:
        clients = [opened.enter_context(greeted(running.path)) for _ in range(4)]
        granted = [len(reserved_by(client, (64 << 10,) * 16)) for client in clients]
        assert granted == [8, 4, 0, 0], "half of it each, three quarters together"
        assert running.counters.value(metrics.REFUSED_CHUNKS_TOTAL) == 4 * 16 - 12
        clients[0].socket.close()
        until(lambda: len(running.server.sessions) == 3)
        assert len(reserved_by(clients[2], (64 << 10,) * 16)) == 8, (
            "what a client leaves others may have"
        )


def test_returned_and_refused_reservations_are_not_counted(tmp_path: Path) -> None:
    with running_socket(tmp_path, 1 << 20) as running, greeted(running.path) as client:
        for _ in range(8):
            handles = reserved_by(client, (1,) * 1100)
            assert len(handles) == 1024, "each takes 512 bytes"
            assert client.say(m.DoneWith(tuple(handles[:512]))) == m.Ok()
            commit = m.Commit(tuple((handle, b"") for handle in handles[512:]))
            assert client.say(commit) == m.ContainsOk([False] * 512)


def test_number_of_clients_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MAX_CLIENTS", 2)
    with running_socket(tmp_path) as running, greeted(running.path), greeted(running.path):
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(PATIENCE_S)
                raw.connect(str(running.path))
                assert raw.recv(1) == b""
        assert running.counters.value(metrics.REFUSED_CLIENTS_TOTAL, metrics.TOO_MANY) == 5
        assert caplog.text.count("turned away, too many are connected: num_connections=2") == 1, (
            "not a line for each"
        )


def test_clients_that_talk_nonsense_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_socket(tmp_path) as running:
        for _ in range(5):
            with greeted(running.path) as client:
                assert isinstance(client.say(HELLO), m.ErrorMessage)
        assert caplog.text.count("refused: error=HELLO 2 after 1 is not a request") == 1
