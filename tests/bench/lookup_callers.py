"""Callers of a service that are no part of what is measured: bytes made beforehand over bare
sockets, and the limit, a bare echo.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

NUM_CALLERS = 4
CONNECTIONS_PER_CALLER = 4
NUM_WINDOWS = 10
WINDOW_S = 0.5


@dataclass(frozen=True)
class Question:
    """One HTTP request, as it goes over the wire."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Rate:
    """Answers a second, in windows of half a second.

    Attributes:
        windows: Of each window.
    """

    windows: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the windows."""
        return statistics.median(self.windows)

    @property
    def num_answers(self) -> float:
        """In all windows together."""
        return sum(self.windows) * WINDOW_S

    @property
    def text(self) -> str:
        """For a table."""
        return f"{self.median:,.0f} ({max(self.windows):,.0f})"


def question(name: str, media_type: str, body: bytes) -> Question:
    """A lookup as a program would send it."""
    head = (
        f"POST /v1/lookup HTTP/1.1\r\nhost: lookup\r\ncontent-type: {media_type}\r\naccept:"
        f" {media_type}\r\ncontent-length: {len(body)}"
    )
    return Question(name, head.encode() + b"\r\n\r\n" + body)


def read_answer(sock: socket.socket) -> bytes:
    """One answer, which has a Content-Length."""
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += _more(sock)
    head = bytes(data[:end]).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(data) < end + 4 + length:
        data += _more(sock)
    return bytes(data)


def _more(sock: socket.socket) -> bytes:
    piece = sock.recv(1 << 17)
    if not piece:
        raise ConnectionError("the service hung up")
    return piece


def rate_of(one: Question, port: int) -> Rate:
    """What all callers get together."""
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    callers = []
    for _ in range(NUM_CALLERS):
        mine, theirs = context.Pipe()
        caller = context.Process(
            target=_call_for_a_while, args=(one.data, port, theirs), daemon=True
        )
        caller.start()
        ends.append(mine)
        callers.append(caller)
    for end in ends:
        end.recv_bytes()
    for end in ends:
        end.send_bytes(b"begin")
    counts = [[int(count) for count in end.recv_bytes().split()] for end in ends]
    for caller in callers:
        caller.join()
    return Rate(tuple(sum(window) / WINDOW_S for window in zip(*counts, strict=True)))


def _call_for_a_while(data: bytes, port: int, parent: Connection) -> None:
    """Have a question on its way over every connection, and tell how many answers each window
    brought.
    """
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS_PER_CALLER)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(data)
    expected = {_body(read_answer(sock)) for sock in socks}
    parent.send_bytes(b"ready")
    parent.recv_bytes()
    counts = [0] * NUM_WINDOWS
    begin = time.perf_counter()
    for sock in socks:
        sock.sendall(data)
    while True:
        for sock in socks:
            if _body(read_answer(sock)) not in expected:
                raise AssertionError("an answer differs from the first")
            window = int((time.perf_counter() - begin) / WINDOW_S)
            if window >= NUM_WINDOWS:
                parent.send_bytes(b" ".join(str(count).encode() for count in counts))
                return
            counts[window] += 1
            sock.sendall(data)


def _body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


@contextmanager
def bare_echo(answer: bytes, num_bytes: int) -> Iterator[int]:
    """A process that sends `answer` for every `num_bytes` that come: what is left when nothing is
    done.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_serve_echo, args=(answer, num_bytes, port), daemon=True)
        process.start()
        try:
            _await_listener(port)
            yield port
        finally:
            process.kill()
            process.join()


def _await_listener(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


class _Echo(asyncio.Protocol):
    def __init__(self, answer: bytes, num_bytes: int) -> None:
        self._answer = answer
        self._num_bytes = num_bytes
        self._num_read = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._num_read += len(data)
        while self._num_read >= self._num_bytes:
            self._num_read -= self._num_bytes
            self._transport.write(self._answer)


def _serve_echo(answer: bytes, num_bytes: int, port: int) -> None:
    import uvloop

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Echo(answer, num_bytes), "127.0.0.1", port, reuse_port=True
        )
        await server.serve_forever()

    uvloop.run(serve())
