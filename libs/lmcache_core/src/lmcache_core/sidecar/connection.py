"""One connection to the sidecar: a Unix socket and a mapping of its arena."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import TypeVar

from lmcache_core.errors import ProtocolError, UnavailableError, VersionError
from lmcache_core.memory.shared import SharedArena, attach_shared_arena
from lmcache_core.sidecar.messages import LENGTH, Hello, HelloOk, Message, Refused, check_length, decode_answer, encode

A = TypeVar("A", bound=Message)


class SidecarConnection:
    """A connection that has said HELLO. Thread-safe; requests of several threads take turns.

    Reservations and pins belong to it: when it closes, the sidecar takes them back.

    Args:
        path: The sidecar's socket.
        hello: What to say first.
        timeout_s: Deadline of connecting and of each call that names none.
    """

    def __init__(self, path: Path, hello: Hello, timeout_s: float) -> None:
        self._path = path
        self._hello = hello
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._welcome: HelloOk | None = None
        self._arena: SharedArena | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._socket is not None

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
        """Connect, say HELLO, map the arena.

        Raises:
            UnavailableError: Nobody listens, or no answer in time.
            VersionError: The sidecar speaks no version of ours.
            ProtocolError: It answered nonsense.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(str(self._path))
        except OSError as exc:
            connection.close()
            raise UnavailableError(f"sidecar at {self._path}: {exc.strerror or exc}") from exc
        self._socket = connection
        try:
            self._welcome = self.call(self._hello, HelloOk)
            self._arena = attach_shared_arena(Path(self._welcome.arena_path), self._welcome.arena_bytes, self._welcome.generation)
        except (UnavailableError, ProtocolError):
            self.close()
            raise

    def close(self) -> None:
        """Close the socket. Idempotent."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def call(self, request: Message, expected: type[A], timeout_s: float | None = None) -> A:
        """Send a request and wait for its answer.

        Args:
            request: What to send.
            expected: Class of the answer.
            timeout_s: Deadline; past it the connection is closed, since an answer may still be on its way.

        Raises:
            UnavailableError: The connection is gone or the deadline has passed.
            VersionError: HELLO was refused for its version.
            ProtocolError: The sidecar refused the request or answered something else.
        """
        with self._lock:
            connection = self._socket
            if connection is None:
                raise UnavailableError("the connection to the sidecar is closed")
            try:
                connection.settimeout(self._timeout_s if timeout_s is None else timeout_s)
                connection.sendall(encode(request))
                (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
                check_length(length)
                answer = decode_answer(_receive(connection, length))
            except OSError as exc:
                self.close()
                raise UnavailableError(f"sidecar at {self._path}: {exc.strerror or exc}") from exc
            except ProtocolError:
                self.close()
                raise
        if isinstance(answer, expected):
            return answer
        if isinstance(answer, Refused):
            kind = VersionError if answer.code == "version" else ProtocolError
            raise kind(f"the sidecar refused {type(request).__name__}: {answer.code}: {answer.message}")
        self.close()
        raise ProtocolError(f"the sidecar answered {type(request).__name__} with {type(answer).__name__}")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    at = 0
    while at < num_bytes:
        received = connection.recv_into(view[at:])
        if received == 0:
            raise ConnectionResetError("the sidecar closed the connection")
        at += received
    return bytes(buffer)
