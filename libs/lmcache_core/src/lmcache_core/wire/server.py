"""A server of the lm:// protocol."""

from __future__ import annotations

import asyncio
import logging
import ssl

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.security.handshakes import BoundedContext
from lmcache_core.telemetry.request_context import Tracer
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.wire.goodbye import end, say_goodbye
from lmcache_core.wire.messages import ANY_SERVER, ErrorCode, ErrorMessage
from lmcache_core.wire.served import Authenticate, ServedStore, ServerLimits, Service, VerifyTicket
from lmcache_core.wire.session import Session
from lmcache_core.wire.stream import FrameStream

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 128


class LmServer:
    """Listens for lm:// connections and serves a store to them.

    Args:
        store: What is served.
        authenticate: Maps HELLO's token to its owner, for example `TokenTable.authenticate`.
        host: Where to listen.
        port: 0 takes a free one; see `port`.
        verify_ticket: Checks tickets, for example `TicketVerifier.verify`; with it, connections without a token may GET by ticket.
        limits: Bounds of what clients can do.
        name: What HELLO_OK calls this server: clients of several servers tell them apart by it.
    """

    def __init__(
        self,
        store: ServedStore,
        authenticate: Authenticate,
        host: str = "127.0.0.1",
        port: int = 0,
        verify_ticket: VerifyTicket | None = None,
        limits: ServerLimits | None = None,
        name: str = ANY_SERVER,
    ) -> None:
        self._service = Service(store, authenticate, verify_ticket, limits or ServerLimits(), name, SparseLog(logger))
        self._tracer: Tracer | None = None
        self._host = host
        self._wanted_port = port
        self._listener: asyncio.Server | None = None
        self._sessions: set[Session] = set()
        self._streams: set[FrameStream] = set()
        self._tasks = TaskSupervisor("lm-server", 2 * self._service.limits.max_connections)

    @property
    def port(self) -> int:
        """The port that it listens on. Only while it is open."""
        if self._listener is None:
            raise UnavailableError("the server does not listen")
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._streams)

    async def open(self, tls: ssl.SSLContext | None = None, tracer: Tracer | None = None) -> None:
        """Listen.

        Args:
            tls: Encrypts every connection, as `server_context` makes it; None: none is.
            tracer: Traces requests; None: nobody does.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        limits = self._service.limits
        self._tracer = tracer
        try:
            self._listener = await loop.create_server(
                lambda: FrameStream(self._accept),
                self._host,
                self._wanted_port,
                backlog=LISTEN_BACKLOG,
                ssl=None if tls is None else BoundedContext(tls, limits.max_handshakes, limits.hello_timeout_s),
                ssl_handshake_timeout=None if tls is None else limits.hello_timeout_s,
            )
        except OSError as exc:
            raise UnavailableError(f"lm server cannot listen on {self._host}:{self._wanted_port}: {exc}") from exc

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening, let requests underway end for up to `drain_s` seconds, then end what is left. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        for session in list(self._sessions):
            session.drain()
        await self._tasks.close(drain_s)
        for stream in self._streams:
            stream.abort()
            await stream.wait_closed()
        self._streams.clear()
        if self._listener is not None:
            await self._listener.wait_closed()
            self._listener = None

    def _accept(self, stream: FrameStream) -> None:
        is_full = len(self._streams) >= self._service.limits.max_connections
        if self._tasks.start("connection", self._turn_away(stream) if is_full else self._serve(stream)):
            self._streams.add(stream)
        else:
            stream.abort()

    async def _serve(self, stream: FrameStream) -> None:
        session = Session(stream, self._service, self._tracer)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._streams.discard(stream)

    async def _turn_away(self, stream: FrameStream) -> None:
        message = "lm connection from %s turned away: %d connections are open"
        self._service.log.log(logging.WARNING, message, stream.peer(), len(self._sessions))
        await say_goodbye(stream, ErrorMessage(ErrorCode.BUSY.value, "too many connections"))
        await end(stream)
        self._streams.discard(stream)
