"""HTTP over blocking sockets, bounded by one deadline from the first address to the last byte.

Standard clients bound each step of an answer, so one that drips in takes for ever, and some take
memory for what an answer states about itself. Here the caller gives every buffer.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import IO, Final

from typing_extensions import Buffer, override

SENT_AT_ONCE: Final = 1 << 20
BUFFERED_BYTES: Final = 64 << 10
MAX_DRAINED_BYTES: Final = 64 << 10
"""An answer with more bytes left than this closes its connection instead."""
MAX_IDLE: Final = 36
FAILURES: Final = (http.client.HTTPException, OSError)
"""What a request may raise: all of it means that the server gave no answer."""
_HUNG_UP: Final = (
    http.client.RemoteDisconnected,
    ConnectionResetError,
    BrokenPipeError,
    ssl.SSLEOFError,
)
_LENGTH: Final = re.compile(r"[0-9]{1,15}")


class Origin:
    """Scheme, host and port of a server.

    Args:
        port: None: the scheme's.
        tls: Trusted authorities; None: the connection is not encrypted.
    """

    def __init__(self, host: str, port: int | None, tls: ssl.SSLContext | None) -> None:
        self.host = host
        self.port = port or (80 if tls is None else 443)
        self.tls = tls
        name = f"[{host}]" if ":" in host else host
        self.host_header = name if port in (None, 80 if tls is None else 443) else f"{name}:{port}"


class _Deadline:
    """The time at which a request ends; moved for each one on the same connection."""

    def __init__(self) -> None:
        self.at = 0.0

    @property
    def left_s(self) -> float:
        left_s = self.at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class _Reader(io.RawIOBase):
    def __init__(self, connected: socket.socket, deadline: _Deadline) -> None:
        super().__init__()
        self._socket = connected
        self._deadline = deadline
        self._bytes = connected.makefile("rb", buffering=0)  # keeps the socket open until `close`

    @override
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        self._socket.settimeout(self._deadline.left_s)
        return self._bytes.readinto(buffer)

    @override
    def close(self) -> None:
        self._bytes.close()
        super().close()


class _Socket:
    """As much of a socket as `http.client` uses; each operation ends at the deadline."""

    def __init__(self, connected: socket.socket, deadline: _Deadline) -> None:
        self.connected = connected
        self._deadline = deadline

    def sendall(self, data: Buffer) -> None:
        left = memoryview(data).cast("B")
        while left:
            self.connected.settimeout(self._deadline.left_s)
            left = left[self.connected.send(left[:SENT_AT_ONCE]) :]

    def makefile(self, mode: str) -> IO[bytes]:
        assert mode == "rb", mode
        return io.BufferedReader(_Reader(self.connected, self._deadline), BUFFERED_BYTES)

    def close(self) -> None:
        self.connected.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, origin: Origin) -> None:
        super().__init__(origin.host, origin.port)
        self.deadline = _Deadline()
        self.raw: socket.socket | None = None
        self._origin = origin

    @override
    def connect(self) -> None:
        raw = socket.create_connection((self.host, self.port), self.deadline.left_s)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._origin.tls is not None:
                raw.settimeout(self.deadline.left_s)
                raw = self._origin.tls.wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise
        self.raw = raw
        self.sock = _Socket(raw, self.deadline)

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed this idle connection, or sent what was not asked for."""
        if self.raw is None:
            return True
        poll = select.poll()
        poll.register(self.raw, select.POLLIN)
        return bool(poll.poll(0))


class BucketAnswer:
    """An answer with its head read; its body comes next, as the caller takes it.

    Attributes:
        size: Length of the body; None if it is not stated.
    """

    def __init__(
        self, pool: ConnectionPool, connection: _Connection, response: http.client.HTTPResponse
    ) -> None:
        self._pool = pool
        self._connection: _Connection | None = connection
        self._response = response
        self.status = response.status
        length = (response.getheader("content-length") or "").strip()
        self.size = int(length) if _LENGTH.fullmatch(length) else None

    def header(self, name: str) -> str | None:
        """Return a header; None without it."""
        return self._response.getheader(name)

    @property
    def modified_at(self) -> float | None:
        """Seconds since the epoch of `Last-Modified`; None without one."""
        try:
            return parsedate_to_datetime(self.header("last-modified") or "").timestamp()
        except (ValueError, OverflowError):
            return None

    def readinto(self, view: memoryview) -> int:
        """Fill a buffer with the next bytes of the body; 0 at its end. Raises `FAILURES`."""
        got = self._response.readinto(view)
        if not got and self._response.length:
            raise ConnectionResetError("the answer ends early")
        return got

    def read(self, limit: int) -> bytes:
        """Return the next bytes of the body, at most `limit`. Raises `FAILURES`."""
        data = memoryview(bytearray(limit))
        at = 0
        while at < limit and (got := self.readinto(data[at:])):
            at += got
        return bytes(data[:at])

    def close(self) -> None:
        """Return the connection, or close it if more than a little is left. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        is_whole = self._response.isclosed()
        left = self._response.length
        if not is_whole and left is not None and left <= MAX_DRAINED_BYTES:
            with contextlib.suppress(*FAILURES):
                self.read(left + 1)
                is_whole = self._response.isclosed()
        self._response.close()
        self._pool.give_back(connection, is_whole and not self._response.will_close)

    def __enter__(self) -> BucketAnswer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ConnectionPool:
    """Connections to one server, kept between requests. Thread-safe. Obeys no proxy variables."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._is_closed = False

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Sequence[bytes | memoryview],
        ends_at: float,
    ) -> BucketAnswer:
        """Send a request and read the head of its answer. The caller closes the answer.

        Sent twice if a connection that had been idle proves to be closed: requests must be safe to
        repeat.

        Args:
            target: Path and query, encoded.
            headers: All headers but the length.
            body: Buffers, sent without a copy.
            ends_at: The deadline, also of reading the answer, on the monotonic clock.

        Raises:
            HTTPException: No HTTP is spoken there.
            OSError: No answer in time, or the connection ended.
        """
        while True:
            connection, is_fresh = self._take()
            try:
                connection.deadline.at = ends_at
                connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                if body or method in ("PUT", "POST"):
                    connection.putheader("content-length", str(sum(len(part) for part in body)))
                connection.endheaders()
                for part in body:
                    connection.send(part)
                return BucketAnswer(self, connection, connection.getresponse())
            except _HUNG_UP:
                self.give_back(connection, is_usable=False)
                if is_fresh:
                    raise
                self._close_idle()
            except BaseException:
                self.give_back(connection, is_usable=False)
                raise

    def give_back(self, connection: _Connection, is_usable: bool) -> None:
        """Keep a connection for the next request, or close it."""
        with self._lock:
            self._busy.discard(connection)
            if is_usable and not self._is_closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all connections; requests that are running end at once. Idempotent."""
        with self._lock:
            self._is_closed = True
            busy = list(self._busy)
        for connection in busy:
            if (raw := connection.raw) is not None:
                with contextlib.suppress(OSError):
                    raw.shutdown(socket.SHUT_RDWR)
        self._close_idle()

    def _take(self) -> tuple[_Connection, bool]:
        while True:
            with self._lock:
                if self._is_closed:
                    raise ConnectionAbortedError("the connections were closed")
                connection = self._idle.pop() if self._idle else None
                is_fresh = connection is None
                if connection is None:
                    connection = _Connection(self.origin)
                self._busy.add(connection)
            if is_fresh or not connection.is_stale:
                return connection, is_fresh
            self.give_back(connection, is_usable=False)

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def why(exc: BaseException) -> str:
    """Return the reason of a failed request, in one short line."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return repr(str(exc))[1:-1][:300] or type(exc).__name__
