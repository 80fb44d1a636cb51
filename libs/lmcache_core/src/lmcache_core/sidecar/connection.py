"""One connection to the sidecar: a Unix socket and a mapping of its arena."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from lmcache_core.errors import ProtocolError, UnavailableError, VersionError
from lmcache_core.memory.shared import SharedArena, attach_shared_arena
from lmcache_core.record import HotVerifier
from lmcache_core.sidecar.messages import (
    CONTEXT,
    LENGTH,
    LOCKS,
    Answer,
    Hello,
    HelloOk,
    Message,
    Refused,
    check_length,
    decode_answer,
    encode,
    encode_within,
)
from lmcache_core.telemetry.request_context import carried

A = TypeVar("A", bound=Message)
_FIXES: dict[type[Exception], str] = {
    FileNotFoundError: "; run lmcache-sidecar, or set sidecar_socket to the socket that it names in its log",
    PermissionError: "; let the user that runs the engine use this socket, and the directory that it is in",
}


class SidecarConnection:
    """A connection that has said HELLO. Thread-safe; requests of several threads take turns. Of no use in a forked child.

    Reservations and pins belong to it: when its socket closes, the sidecar takes them back and gives the memory to others. So the
    socket of a connection that is given up stays until nothing is held through it any more (`hold`, `let_go`). So does its share in the
    lock of the sidecar's generation, from which the next sidecar knows what may still be written to.

    Args:
        path: The sidecar's socket.
        hello: What to say first.
        timeout_s: Deadline of connecting, and of each call that names none.
    """

    def __init__(self, path: Path, hello: Hello, timeout_s: float) -> None:
        self._path = path
        self._hello = replace(hello, capabilities=(*hello.capabilities, LOCKS))
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._books = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._is_usable = False
        self._num_held = 0
        self._welcome: HelloOk | None = None
        self._arena: SharedArena | None = None
        self.verifier = HotVerifier("always")

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._is_usable and self._pid == os.getpid()

    @property
    def has_ended(self) -> bool:
        """Whether the other end has closed the socket, as far as is known without asking it. Waits for nothing."""
        with self._books:
            if self._socket is None:
                return True
            ended = select.poll()
            ended.register(self._socket, select.POLLRDHUP)
            return bool(ended.poll(0))

    @property
    def is_greeted(self) -> bool:
        """Whether the sidecar has answered HELLO."""
        return self._welcome is not None

    @property
    def welcome(self) -> HelloOk:
        """The sidecar's answer to HELLO. Only after `open`."""
        assert self._welcome is not None
        return self._welcome

    @property
    def arena(self) -> SharedArena:
        """The mapped arena. Only after `open`; stays mapped while anyone holds a view of it."""
        assert self._arena is not None
        return self._arena

    def open(self) -> None:
        """Connect, say HELLO, join the sidecar's generation, map the arena.

        Raises:
            UnavailableError: Nobody listens, or no answer in time.
            VersionError: The sidecar speaks no version of ours.
            ProtocolError: It answered nonsense.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(str(self._path))
        except (OSError, ValueError) as exc:
            connection.close()
            raise UnavailableError(f"sidecar at {self._path}: {exc}{_FIXES.get(type(exc), '')}") from exc
        self._socket, self._pid, self._is_usable = connection, os.getpid(), True
        try:
            self._welcome = self._greet()
            self._arena = attach_shared_arena(Path(self._welcome.arena_path), self._welcome.arena_bytes, self._welcome.generation)
        except (UnavailableError, ProtocolError):
            self.close()
            raise
        self.verifier = HotVerifier.lenient(self._welcome.verify_hot)

    def close(self) -> None:
        """Make no more calls; close the socket as soon as nothing is held. Idempotent."""
        with self._books:
            self._is_usable = False
            self._close_unless_held()

    def hold(self, count: int) -> None:
        """Keep the socket open for that many pieces of the arena; before they are asked for, so that no gap is left."""
        with self._books:
            self._num_held += count

    def let_go(self, count: int) -> None:
        """The counterpart of `hold`: that many pieces are touched no more."""
        with self._books:
            self._num_held -= count
            assert self._num_held >= 0, "more was let go than was held"
            self._close_unless_held()

    def call(self, request: Message, expected: type[A], timeout_s: float | None = None, turn_s: float | None = None) -> A:
        """Send a request and wait for its answer.

        Args:
            request: What to send.
            expected: Class of the answer.
            timeout_s: Deadline of the exchange; past it the connection is given up, since an answer may still be on its way.
            turn_s: Longest wait for requests of other threads; past it the connection is as good as before. By default `timeout_s`.

        Raises:
            UnavailableError: The connection is gone or busy, or the deadline has passed.
            VersionError: HELLO was refused for its version.
            ProtocolError: The sidecar refused the request or answered something else.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self.hold(1)
        try:
            if not self._turn.acquire(timeout=limit_s if turn_s is None else turn_s):
                raise UnavailableError(f"sidecar at {self._path}: busy with requests of other threads")
            try:
                return self._exchange(request, expected, time.monotonic() + limit_s)
            finally:
                self._turn.release()
        finally:
            self.let_go(1)

    def _greet(self) -> HelloOk:
        try:
            welcome = self.call(self._hello, HelloOk)
        except _NotAMessage as exc:
            # One text whatever it was: who reports each cause once is not to report every random byte.
            raise ProtocolError("what answers there speaks another protocol; set sidecar_socket to a sidecar's socket") from exc
        if not self._hello.version_min <= welcome.version <= self._hello.version_max:
            spoken = f"{self._hello.version_min} to {self._hello.version_max}"
            raise VersionError(f"the sidecar answered in version {welcome.version}; this client speaks {spoken}")
        return welcome

    def _exchange(self, request: Message, expected: type[A], deadline: float) -> A:
        connection = self._socket
        if connection is None or not self.is_open:
            raise UnavailableError("the connection to the sidecar is closed")
        try:
            connection.settimeout(_remaining(deadline))
            connection.sendall(self._encode(request))
            (length,) = LENGTH.unpack(_receive(connection, LENGTH.size, deadline))
            answer = _decoded(connection, length, deadline)
        except OSError as exc:
            self.close()
            raise UnavailableError(f"sidecar at {self._path}: {exc}") from exc
        except ProtocolError:
            self.close()
            raise
        if isinstance(answer, expected):
            return answer
        self.close()
        if isinstance(answer, Refused):
            kind = VersionError if answer.code == "version" else ProtocolError
            raise kind(f"the sidecar refused {type(request).__name__}: {answer.code}: {answer.message}")
        raise ProtocolError(f"the sidecar answered {type(request).__name__} with {type(answer).__name__}")

    def _encode(self, request: Message) -> bytes:
        whose, welcome = carried(), self._welcome
        if whose is None or welcome is None or CONTEXT not in welcome.capabilities:
            return encode(request)
        return encode_within(request, whose)

    def _close_unless_held(self) -> None:
        connection = self._socket
        if self._is_usable or self._num_held or connection is None:
            return
        self._socket = None
        if self._arena is not None:
            self._arena.lock.release()
        if self._pid == os.getpid():  # in a forked child it would end the parent's connection
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class _NotAMessage(ProtocolError):
    """Bytes that are no message of this protocol."""


def _decoded(connection: socket.socket, length: int, deadline: float) -> Answer:
    try:
        check_length(length)
        return decode_answer(_receive(connection, length, deadline))
    except ProtocolError as exc:
        raise _NotAMessage(str(exc)) from exc


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    at = 0
    while at < num_bytes:
        connection.settimeout(_remaining(deadline))
        received = connection.recv_into(view[at:])
        if received == 0:
            raise ConnectionResetError("it closed the connection")
        at += received
    return bytes(buffer)


def _remaining(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s
