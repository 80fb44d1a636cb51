"""A server of the lm:// protocol."""

from __future__ import annotations

import logging
import ssl
from functools import partial

from lmcache_core.security.handshakes import BoundedContext
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.telemetry.tracing import Tracer
from lmcache_core.wire.listener import FrameListener
from lmcache_core.wire.messages import ANY_SERVER, ErrorCode, ErrorMessage
from lmcache_core.wire.served import (
    Authenticate,
    LmService,
    ServedStore,
    ServerLimits,
    VerifyTicket,
)
from lmcache_core.wire.session import LmSession
from lmcache_core.wire.stream import FrameStream

logger = logging.getLogger(__name__)


class LmServer:
    """Listens for lm:// connections and serves a store to them.

    Args:
        store: What is served.
        authenticate: Maps HELLO's token to its owner, for example `TokenTable.authenticate`.
        host: Where to listen.
        port: 0 takes a free one; see `port`.
        verify_ticket: Checks tickets, for example `TicketVerifier.verify`; with it, connections
            without a token may GET by ticket.
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
        limits = limits or ServerLimits()
        self._service = LmService(
            store, authenticate, verify_ticket, limits, name, SparseLog(logger)
        )
        self._tracer: Tracer | None = None
        self._host = host
        self._wanted_port = port
        busy = ErrorMessage(ErrorCode.BUSY.value, "too many connections")
        self._listener = FrameListener(
            "lm server",
            limits.max_connections,
            self._begin,
            self._turned_away,
            busy,
            limits.max_strangers,
        )

    @property
    def port(self) -> int:
        """The port that it listens on. Only while it is open."""
        return self._listener.port

    @property
    def num_connections(self) -> int:
        """Connections that are served now."""
        return self._listener.num_connections

    async def open(self, tls: ssl.SSLContext | None = None, tracer: Tracer | None = None) -> None:
        """Listen.

        Args:
            tls: Encrypts every connection, as `server_context` makes it; None: none is.
            tracer: Traces requests; None: nobody does.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        limits = self._service.limits
        self._tracer = tracer
        if tls is None:
            await self._listener.open(self._host, self._wanted_port)
        else:
            bounded = BoundedContext(tls, limits.max_handshakes, limits.hello_timeout_s)
            await self._listener.open(
                self._host, self._wanted_port, bounded, limits.hello_timeout_s
            )

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening, let requests underway end for up to `drain_s` seconds, then end what
        is left. Idempotent.
        """
        await self._listener.close(drain_s)

    def _begin(self, stream: FrameStream) -> LmSession:
        return LmSession(
            stream, self._service, partial(self._listener.let_in, stream), self._tracer
        )

    def _turned_away(self, stream: FrameStream) -> None:
        message = "lm connection turned away, too many are open: client=%s num_connections=%d"
        self._service.log.log(
            logging.WARNING, message, stream.peer(), self._listener.num_connections
        )
