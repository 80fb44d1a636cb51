"""A listener for byte streams: bounds their number, and drains them when it closes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.concurrency.supervisor import stop_listening
from lmcache_core.config.options import MAX_SOCKET_PATH_BYTES
from lmcache_core.errors import UnavailableError
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.wire.messages import ErrorMessage
from lmcache_core.wire.stream import FrameStream

logger = logging.getLogger(__name__)

LISTEN_BACKLOG: Final = 128


class FrameSession(Protocol):
    """Serves one connection."""

    async def run(self) -> None:
        """Serve the connection and end it."""

    def drain(self) -> None:
        """Accept no more requests; the connection ends when those underway are answered."""


OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def limit_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Make a loop that has no descriptor left for new connections log that once a minute.

    asyncio's own loop logs a traceback for each place of the backlog, every second: with a backlog
    of 2048 a process without descriptors would do nothing else. It also tries a listener again that
    has closed meanwhile; that is not logged.
    """
    sparse = SparseLog(logger)

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES and "socket" in context:
            sparse.log(
                logging.ERROR, "cannot accept connections, leaving them queued: error=%s", error
            )
        elif not (isinstance(error, ValueError) and "_start_serving" in context["message"]):
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)


def socket_path_problem(path: Path) -> str:
    """Return why a listener cannot be at the path of a Unix socket, "" if its name, and what is
    there now, are no reason. A socket that is there may be replaced, or another may listen at it.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        return f"has {length} bytes, and a Unix socket's may have {MAX_SOCKET_PATH_BYTES}"
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:  # nothing is there, or its directory is the reason
        return ""
    except ValueError:
        return "holds a NUL character"
    return "" if is_socket else "is something other than a socket"


class FrameListener:
    """Listens, and serves a bounded number of connections concurrently, each by its own session.

    Args:
        name: Name of the listener, for errors and for the names of tasks.
        max_connections: Connections served concurrently. As many more may be sent the reason for
            their refusal; further ones are closed without a word.
        turned_away: Called for each connection beyond the limit.
        goodbye: Message for such connections; None closes them without a word.
        max_strangers: Concurrent connections that have not been `let_in`; a new one displaces the
            oldest. 0: every connection is let in immediately.
    """

    def __init__(
        self,
        name: str,
        max_connections: int,
        begin: Callable[[FrameStream], FrameSession],
        turned_away: Callable[[FrameStream], None],
        goodbye: ErrorMessage | None = None,
        max_strangers: int = 0,
    ) -> None:
        self._name = name
        self._max_connections = max_connections
        self._begin = begin
        self._turned_away = turned_away
        self._goodbye = goodbye
        self._server: asyncio.Server | None = None
        self._sessions: dict[FrameStream, FrameSession] = {}
        self._max_strangers = max_strangers
        self._strangers: dict[FrameStream, None] = {}  # oldest first
        self._served: dict[FrameStream, str] = {}  # with the owner, oldest first
        self._leaving: set[FrameStream] = set()
        self._tasks = TaskSupervisor(name, 2 * (max_connections + max_strangers))
        self._is_closing = False

    @property
    def port(self) -> int:
        """The port that it listens on. Only while it is open.

        Raises:
            UnavailableError: It is not open.
        """
        if self._server is None or not self._server.sockets:
            raise UnavailableError(f"{self._name} does not listen")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Open connections, except those being turned away."""
        return len(self._served) + len(self._strangers)

    @property
    def sessions(self) -> Collection[FrameSession]:
        """Sessions of the open connections."""
        return self._sessions.values()

    def let_in(self, stream: FrameStream, owner: str) -> bool:
        """Promote a stranger to the connections that are served; False if there is no room.

        One owner may have all places while no other wants one. Then the owner with the most gives
        up its oldest connection for one of an owner with fewer, after the requests underway.

        Args:
            owner: Tenant, or another name under which connections share the places.
        """
        if stream in self._strangers:
            if len(self._served) >= self._max_connections and not self._make_room(owner):
                self._turned_away(stream)
                return False
            del self._strangers[stream]
            self._served[stream] = owner
        return True

    def _make_room(self, owner: str) -> bool:
        counts = Counter(self._served.values())
        [(largest, count)] = counts.most_common(1)
        if count <= counts[owner] + 1:
            return False
        oldest = next(stream for stream, each in self._served.items() if each == largest)
        self._turned_away(oldest)
        del self._served[oldest]
        self._leaving.add(oldest)
        self._sessions[oldest].drain()
        return True

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        handshake_s: float | None = None,
    ) -> Sequence[socket.socket]:
        """Listen.

        Args:
            port: 0 picks a free one.
            handshake_s: Longest TLS handshake; only with `tls`.

        Returns:
            The listening sockets. Connections inherit their options.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        limit_accept_errors(loop)
        try:
            self._server = await loop.create_server(
                lambda: FrameStream(self._accept),
                host,
                port,
                backlog=LISTEN_BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=handshake_s,
            )
        except OSError as exc:
            raise UnavailableError(f"{self._name} cannot listen on {host}:{port}: {exc}") from exc
        return self._server.sockets

    async def listen_unix(self, path: Path) -> None:
        """Listen on a Unix socket.

        Raises:
            OSError: The path cannot be bound.
        """
        loop = asyncio.get_running_loop()
        limit_accept_errors(loop)
        self._server = await loop.create_unix_server(
            lambda: FrameStream(self._accept), str(path), backlog=LISTEN_BACKLOG
        )

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening, let requests underway finish for up to `drain_s` seconds, then end the
        rest. Idempotent.
        """
        self._is_closing = True
        if self._server is not None:
            await stop_listening(self._server)
        for session in list(self.sessions):
            session.drain()
        left = [*self._served, *self._strangers, *self._leaving]
        await self._tasks.close(drain_s)
        for stream in left:
            stream.abort()
        for stream in left:
            await stream.wait_closed()
        self._served.clear()
        self._strangers.clear()
        self._leaving.clear()
        # No `Server.wait_closed`: since Python 3.12 it also waits for TLS handshakes that never
        # end.
        self._server = None

    def _accept(self, stream: FrameStream) -> None:
        if self._is_closing:
            self._leaving.add(stream)
            stream.abort()
        elif self._max_strangers and self._tasks.start("connection", self._serve(stream)):
            self._strangers[stream] = None
            if len(self._strangers) > self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                self._turned_away(oldest)
                oldest.abort()
        elif (
            not self._max_strangers
            and len(self._served) < self._max_connections
            and self._tasks.start("connection", self._serve(stream))
        ):
            self._served[stream] = ""
        else:
            self._turned_away(stream)
            if self._goodbye is not None and self._tasks.start(
                "goodbye", self._turn_away(stream, self._goodbye)
            ):
                self._leaving.add(stream)
            else:
                stream.abort()

    async def _serve(self, stream: FrameStream) -> None:
        session = self._begin(stream)
        self._sessions[stream] = session
        try:
            await session.run()
        finally:
            del self._sessions[stream]
            self._served.pop(stream, None)
            self._leaving.discard(stream)
            self._strangers.pop(stream, None)

    async def _turn_away(self, stream: FrameStream, goodbye: ErrorMessage) -> None:
        await stream.say_goodbye(goodbye)
        await stream.end()
        self._leaving.discard(stream)
