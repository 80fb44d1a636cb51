"""The listener for LMCache clients."""

from __future__ import annotations

import logging
import socket

from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.wire import FrameStream
from lmcache_core.wire.listener import FrameListener

from lmcache_storage.compat.dialect import Dialect
from lmcache_storage.compat.refusals import CloseReason
from lmcache_storage.compat.session import CompatLimits, CompatService, CompatSession
from lmcache_storage.compat.values import ForeignValues

logger = logging.getLogger(__name__)

KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15
KEEPALIVE_PROBES = 4


class CompatServer:
    """Serves values to LMCache clients. Whoever reaches the port is served: it knows no credentials
    and no TLS.

    Args:
        values: What is served.
        dialect: What its clients speak.
        limits: Bounds of what they can do.
        counters: Where requests and closed connections are counted.
        host: Where to listen.
        port: 0 takes a free one; see `port`.
    """

    def __init__(
        self,
        values: ForeignValues,
        dialect: Dialect,
        limits: CompatLimits,
        counters: Counters,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        room = ByteGate(limits.max_receiving_bytes)
        self._service = CompatService(dialect, values, limits, room, counters, SparseLog(logger))
        self._host = host
        self._wanted_port = port
        self._listener = FrameListener(
            "the listener for LMCache clients",
            limits.max_connections,
            self._begin,
            self._turned_away,
        )

    @property
    def port(self) -> int:
        """The port that it listens on. Only while it is open."""
        return self._listener.port

    @property
    def num_connections(self) -> int:
        """Connections that are served now."""
        return self._listener.num_connections

    async def open(self) -> None:
        """Listen.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        for listening in await self._listener.open(self._host, self._wanted_port):
            _keep_alive(listening)

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening, let requests underway end for up to `drain_s` seconds, then end what
        is left. Idempotent.
        """
        await self._listener.close(drain_s)

    def _begin(self, stream: FrameStream) -> CompatSession:
        return CompatSession(stream, self._service)

    def _turned_away(self, stream: FrameStream) -> None:
        self._service.closed(
            stream,
            CloseReason.TOO_MANY,
            f"{self._service.limits.max_connections} connections are open",
        )


def _keep_alive(listening: socket.socket) -> None:
    """Let the kernel end connections whose other side is gone; those that are accepted take
    these options over.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
