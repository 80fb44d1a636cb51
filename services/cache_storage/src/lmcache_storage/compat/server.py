"""The listener for LMCache clients and its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.wire.listener import FrameListener
from lmcache_core.wire.served import ServedStore
from lmcache_core.wire.stream import FrameStream

from lmcache_storage import metrics
from lmcache_storage.compat.dialect import (
    DIALECTS,
    CloseReason,
    CompatCommand,
    CompatRefusedError,
    Dialect,
    Request,
)
from lmcache_storage.compat.values import MAX_HEAD_BYTES, ForeignValues
from lmcache_storage.settings import StorageSettings

logger = logging.getLogger(__name__)

KEEPALIVE_IDLE_S: Final = 60
KEEPALIVE_INTERVAL_S: Final = 15
KEEPALIVE_PROBES: Final = 4
RECEIVING_SHARE: Final = 4
"""Values being received may hold one part in this many of the host memory."""


@dataclass(frozen=True, slots=True)
class CompatLimits:
    """Bounds on what these clients, which have no credentials, can make the service do.

    Attributes:
        max_connections: Concurrent connections; a further one is closed without an answer.
        max_receiving_bytes: Memory that values being received may hold together; a larger one is
            received only alone.
        idle_timeout_s: Longest silence. Long, since these clients do not reconnect; the kernel
            detects those that are gone.
        transfer_timeout_s: Time for the rest of a header and for each transfer of a value, in
            addition to the time that `min_bytes_per_s` allows.
        min_bytes_per_s: Slowest transfer of a value.
        room_timeout_s: Longest wait for other values to be received; then the value is not stored.
    """

    max_connections: int
    max_value_bytes: int
    max_receiving_bytes: int
    idle_timeout_s: float = 7 * 24 * 3600.0
    transfer_timeout_s: float = 10.0
    min_bytes_per_s: int = 1 << 20
    room_timeout_s: float = 2.0

    def transfer_s(self, num_bytes: int) -> float:
        """Return the longest time for a value of that size."""
        return self.transfer_timeout_s + num_bytes / self.min_bytes_per_s


class CompatServer:
    """Serves values to LMCache clients. Everyone who reaches the port is served: it knows no
    credentials and no TLS.

    Attributes:
        listener: The listener; has the port once it is open.
        room: Memory for values being received.
    """

    def __init__(
        self, values: ForeignValues, dialect: Dialect, limits: CompatLimits, counters: Counters
    ) -> None:
        self.values = values
        self.dialect = dialect
        self.limits = limits
        self.counters = counters
        self.room = ByteGate(limits.max_receiving_bytes)
        self._log = SparseLog(logger)
        self.listener = FrameListener(
            "the listener for LMCache clients",
            limits.max_connections,
            lambda stream: CompatSession(stream, self),
            lambda stream: self.closed(
                stream, CloseReason.TOO_MANY, f"{limits.max_connections} connections are open"
            ),
        )

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 picks a free one.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        for listening in await self.listener.listen(host, port):
            # The kernel closes connections whose other side is gone; accepted connections inherit
            # these options.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

    def closed(self, stream: FrameStream, reason: CloseReason, detail: str) -> None:
        """Count and log that a connection is closed, and why."""
        self.counters.add(metrics.COMPAT_CLOSED_TOTAL, label=reason)
        message = "connection of an LMCache client closed: client=%s reason=%s detail=%s"
        self._log.log(logging.WARNING, message, stream.peer(), reason.value, detail)


def create_compat_server(
    settings: StorageSettings, store: ServedStore, counters: Counters
) -> CompatServer:
    """Create the listener that the settings describe, not listening yet.

    Args:
        settings: Settings with a tenant for these clients.
        counters: Counters, under the names of `lmcache_storage.metrics`.
    """
    assert settings.lmcache_compat_tenant is not None, "checked by the settings"
    dialect = DIALECTS[settings.lmcache_compat_dialect]
    limits = CompatLimits(
        settings.lmcache_compat_max_connections,
        settings.max_record_bytes - MAX_HEAD_BYTES,
        settings.memory_bytes // RECEIVING_SHARE,
    )
    values = ForeignValues(store, settings.lmcache_compat_tenant, dialect.name, counters)
    return CompatServer(values, dialect, limits, counters)


class CompatSession:
    """Answers the requests of one connection in order; these clients send the next one after the
    reply to the last, or need no reply.
    """

    def __init__(self, stream: FrameStream, server: CompatServer) -> None:
        self._stream = stream
        self._server = server
        self._dialect = server.dialect
        self._values = server.values
        self._limits = server.limits
        self._is_waiting = False
        self._is_draining = False

    async def run(self) -> None:
        """Serve until the client disconnects or violates a bound, then close the connection."""
        try:
            while not self._is_draining:
                request = await self._next_request()
                if request is None:
                    return
                await self._answer(request)
        except CompatRefusedError as exc:
            self._server.closed(self._stream, exc.reason, str(exc))
        except UnavailableError:
            pass  # the client disconnected during an answer, or the service shuts down
        finally:
            await self._stream.end()

    def drain(self) -> None:
        """Accept no more requests; the connection ends when the one underway is answered."""
        self._is_draining = True
        if self._is_waiting:
            self._stream.close()

    async def _next_request(self) -> Request | None:
        """Return the next request; None if the client has disconnected between two."""
        header = bytearray(self._dialect.request.size)
        view = memoryview(header)
        self._is_waiting = True
        try:
            async with asyncio.timeout(self._limits.idle_timeout_s):
                await self._stream.readinto(view[:1])
        except TimeoutError:
            raise CompatRefusedError(
                CloseReason.IDLE, f"silent for {self._limits.idle_timeout_s:g} s"
            ) from None
        except UnavailableError:
            return None
        finally:
            self._is_waiting = False
        await self._receive(view[1:], "a header")
        return self._dialect.parse(header, self._limits.max_value_bytes)

    async def _answer(self, request: Request) -> None:
        self._server.counters.add(metrics.COMPAT_REQUESTS_TOTAL, label=request.command.name.lower())
        match request.command:
            case CompatCommand.PUT:
                await self._put(request)
            case CompatCommand.GET:
                await self._get(request.key)
            case CompatCommand.EXIST:
                is_there = await self._values.contains(request.key)
                await self._send(self._dialect.found() if is_there else self._dialect.missing())
            case CompatCommand.HEALTH:
                await self._send(self._dialect.found())

    async def _get(self, key: str) -> None:
        found = await self._values.get(key)
        if found is None:
            await self._send(self._dialect.missing())
            return
        chunk, about = found
        try:
            value = chunk.memory.byte_array
            await self._send(self._dialect.found(len(value), about), value)
        finally:
            chunk.release()

    async def _put(self, request: Request) -> None:
        """Receive a value. There is no reply, so a value without room is read to its end and
        discarded.
        """
        num_bytes = request.num_bytes
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._limits.room_timeout_s):
                    await held.enter_async_context(self._server.room.using(num_bytes))
            except TimeoutError:
                self._server.counters.add(metrics.REFUSED_CHUNKS_TOTAL)
                memory = None
            else:
                memory = self._values.allocate(num_bytes)
            if memory is None:
                with self._expecting("the rest of a value"):
                    async with self._stream.paced(self._limits.transfer_s):
                        await self._stream.discard(num_bytes)
                return
            with memory:
                await self._receive(memory.byte_array, "a value")
                await self._values.put(request.key, request.about, memory)

    async def _receive(self, view: memoryview, what: str) -> None:
        with self._expecting(f"the rest of {what}"):
            async with self._stream.paced(self._limits.transfer_s):
                await self._stream.readinto(view)

    async def _send(self, header: bytes, *value: memoryview) -> None:
        """Send a reply with the header in one piece: some clients read it in a single call."""
        num_bytes = sum(map(len, value))
        try:
            async with asyncio.timeout(self._limits.transfer_s(num_bytes)):
                await self._stream.send(header, *value)
        except TimeoutError:
            raise CompatRefusedError(
                CloseReason.SLOW, f"a reply of {len(header) + num_bytes} bytes was not read in time"
            ) from None

    @contextmanager
    def _expecting(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise CompatRefusedError(CloseReason.SLOW, f"{what} did not arrive in time") from None
        except UnavailableError:
            raise CompatRefusedError(
                CloseReason.SHORT, f"the connection ended before {what} had arrived"
            ) from None
