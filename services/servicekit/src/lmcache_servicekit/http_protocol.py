"""HTTP connections with bounds that the HTTP library does not have: on what stands around bodies, on how long it takes, on their number."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 << 10
"""Request line and headers; also what a chunked body may take beside its bytes, or beside eight times as many."""
MAX_CHUNK_OVERHEAD: Final = 8
MAX_CONNECTIONS: Final = 8192
HEAD_TIMEOUT_S: Final = 10.0
"""From a connection, or the first byte of a further request on it, to the end of the headers."""

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

logger = logging.getLogger(__name__)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose caller sends endless headers, or none, or that is one too many."""

    _num_received = 0
    _num_body = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._end(f"{MAX_CONNECTIONS} connections are open")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._num_received += len(data)
        super().data_received(data)
        if self._in_head:
            self._await_head()
        beside = self._num_received - self._num_body
        if beside <= MAX_HEAD_BYTES + MAX_CHUNK_OVERHEAD * self._num_body or self.transport.is_closing():
            return
        if self._in_head:
            self.transport.write(_TOO_LARGE)
        self._end(f"more than {MAX_HEAD_BYTES} bytes of headers")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._num_received = self._num_body = 0
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The last byte of its headers."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._num_body += len(body)
        super().on_body(body)

    def _await_head(self) -> None:
        """Headers that come with their first byte, as they usually do, cost no timer."""
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._end, f"no complete headers within {HEAD_TIMEOUT_S:g} s")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end(self, why: str) -> None:
        logger.debug("HTTP connection of %s ended: %s", self.client[0] if self.client else "somebody", why)
        self._stop_timer()
        self.transport.close()
