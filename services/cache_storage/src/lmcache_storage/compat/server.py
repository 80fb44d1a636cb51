"""The listener for LMCache clients."""

from __future__ import annotations

import asyncio
import logging
import socket

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.wire import FrameStream

from lmcache_storage.compat.dialect import Dialect
from lmcache_storage.compat.refusals import CloseReason
from lmcache_storage.compat.session import CompatLimits, CompatService, CompatSession
from lmcache_storage.compat.values import ForeignValues

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 128
KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15
KEEPALIVE_PROBES = 4


class CompatServer:
    """Serves values to LMCache clients. Whoever reaches the port is served: it knows no credentials and no TLS.

    Args:
        values: What is served.
        dialect: What its clients speak.
        limits: Bounds of what they can do.
        counters: Where requests and closed connections are counted.
        host: Where to listen.
        port: 0 takes a free one; see `port`.
    """

    def __init__(
        self, values: ForeignValues, dialect: Dialect, limits: CompatLimits, counters: Counters, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        room = ByteGate(limits.max_receiving_bytes)
        self._service = CompatService(dialect, values, limits, room, counters, SparseLog(logger))
        self._host = host
        self._wanted_port = port
        self._listener: asyncio.Server | None = None
        self._sessions: set[CompatSession] = set()
        self._streams: set[FrameStream] = set()
        self._tasks = TaskSupervisor("compat", 2 * limits.max_connections)  # those that end are still counted there

    @property
    def port(self) -> int:
        """The port that it listens on. Only while it is open."""
        if self._listener is None:
            raise UnavailableError("the listener for LMCache clients is not open")
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._streams)

    async def open(self) -> None:
        """Listen.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: FrameStream(self._accept), self._host, self._wanted_port, backlog=LISTEN_BACKLOG
            )
        except OSError as exc:
            raise UnavailableError(f"cannot listen on {self._host}:{self._wanted_port} for LMCache clients: {exc}") from exc
        for listening in self._listener.sockets:
            _keep_alive(listening)

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening, let requests underway end for up to `drain_s` seconds, then end what is left. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        for session in list(self._sessions):
            session.drain()
        await self._tasks.close(drain_s)
        for stream in list(self._streams):
            stream.abort()
            await stream.wait_closed()
        self._streams.clear()
        if self._listener is not None:
            await self._listener.wait_closed()
            self._listener = None

    def _accept(self, stream: FrameStream) -> None:
        max_connections = self._service.limits.max_connections
        if len(self._streams) < max_connections and self._tasks.start("connection", self._serve(stream)):
            self._streams.add(stream)
        else:
            self._service.closed(stream, CloseReason.TOO_MANY, f"{max_connections} connections are open")
            stream.abort()

    async def _serve(self, stream: FrameStream) -> None:
        session = CompatSession(stream, self._service)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._streams.discard(stream)


def _keep_alive(listening: socket.socket) -> None:
    """Let the kernel end connections whose other side is gone; those that are accepted take these options over."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
