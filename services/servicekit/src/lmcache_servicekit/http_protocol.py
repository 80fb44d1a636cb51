"""HTTP connections with bounds that the HTTP library lacks: on bytes outside of bodies, on time,
and on the number of connections.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope

MAX_HEAD_BYTES: Final = 64 << 10
"""Bound on request line and headers; also on the framing of a chunked body, in addition to
`MAX_CHUNK_OVERHEAD` times its size.
"""
MAX_CHUNK_OVERHEAD: Final = 8
MAX_CONNECTIONS: Final = 8192
HEAD_TIMEOUT_S: Final = 10.0
"""From a connection, or the first byte after an answer, to the end of the next request's headers.

The rest of a request that was answered before it was complete counts as bytes after its answer.
"""
WRITE_TIMEOUT_S: Final = 30.0
"""Time to send pending output, in addition to the time at `SLOWEST_READER_BYTES_PER_S`."""
SLOWEST_READER_BYTES_PER_S: Final = 64 << 10
READ_BYTES: Final = 64 << 10
PARSED_AT_ONCE: Final = 512
"""Bytes outside of bodies, few enough to contain no more than some 30 requests."""

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"  # noqa: E501

logger = logging.getLogger(__name__)


class _HeldFlow(FlowControl):
    """Pauses reading while the connection holds unparsed requests.

    Without it, a handler that waits for its body or for its caller to disconnect resumes reading.
    """

    def __init__(self, transport: asyncio.Transport, protocol: BoundedHttpProtocol) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.num_held_bytes:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose caller sends endless headers, or none, or does not read its answers.

    If there are too many connections, the one idle longest is closed.

    Pipelined requests are parsed a few at a time: while one waits for the answers before it, the
    bytes after it are kept unparsed and nothing more is read.
    """

    _num_received = 0
    _num_body = 0
    _in_head = True
    _body_left = 0
    _held: memoryview = memoryview(b"")
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _idle: dict[BoundedHttpProtocol, None]

    @property
    def num_held_bytes(self) -> int:
        """Bytes received but not parsed yet."""
        return len(self._held)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = self._bounded(self.app)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _HeldFlow(transport, self)
        if hasattr(transport, "max_size"):  # of asyncio's own; TLS and uvloop have fixed ones
            transport.max_size = READ_BYTES
        # This server's connections without a request underway, the one idle longest first.
        self._idle = self.server_state.__dict__.setdefault("idle", {})
        if len(self.connections) > MAX_CONNECTIONS:
            leaving = next(iter(self._idle), self)
            leaving._end(f"{MAX_CONNECTIONS} connections are open")
            if leaving is self:
                return
        self._idle[self] = None
        self._start_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._held = memoryview(b"")
        self._stop_timer()
        self._stop_write_timer()
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Bound the pending output: the transport closes itself after this."""
        super().eof_received()
        self._bound_writing()

    @override
    def data_received(self, data: bytes) -> None:
        self._held = memoryview(bytes(self._held) + data if self._held else data)
        self._parse()

    def on_response_complete(self) -> None:
        """Start the next waiting request, and parse more once none waits."""
        is_last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            self._bound_writing()
            return
        if is_last:
            self._idle[self] = None
        if self._held:
            self._parse()

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        self._num_received = self._num_body = self._body_left = 0
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header of a request."""
        super().on_header(name, value)
        if self.headers[-1][0] == b"content-length":
            self._body_left = int(value)  # the parser has refused anything but a number

    def on_headers_complete(self) -> None:
        """Handle the last byte of the headers."""
        self._in_head = False
        self._stop_timer()
        self._idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a piece of the body."""
        self._num_body += len(body)
        self._body_left -= len(body)
        super().on_body(body)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_writing()

    @override
    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()
        # Below the low-water mark does not mean empty, and a transport that is closing is never
        # paused again.
        self._bound_closing()

    def timeout_keep_alive_handler(self) -> None:
        """End a connection that has been idle for a while."""
        super().timeout_keep_alive_handler()
        self._bound_writing()

    def _bounded(self, app: ASGI3Application) -> ASGI3Application:
        """Bound the closing of a connection whose handler ends before its answer does."""

        async def bounded(
            scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
        ) -> None:
            try:
                await app(scope, receive, send)
            finally:
                if not self.cycle.response_complete:
                    # The HTTP library closes the connection once this has returned or raised.
                    self.loop.call_soon(self._bound_closing)

        return bounded

    def _bound_closing(self) -> None:
        if self.transport.is_closing():
            self._bound_writing()

    def _bound_writing(self) -> None:
        # A closed transport, or a sending handler, would wait forever for the caller to read.
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and self._write_timer is None:
            timeout_s = WRITE_TIMEOUT_S + num_bytes / SLOWEST_READER_BYTES_PER_S
            self._write_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _parse(self) -> None:
        while self._held and not self.pipeline and not self.transport.is_closing():
            # Before the end of a body there can be no further request.
            size = max(PARSED_AT_ONCE, self._body_left)
            part, self._held = self._held[:size], self._held[size:]
            self._num_received += len(part)
            super().data_received(part)  # type: ignore[arg-type]
            self._check_overhead()
        if self.transport.is_closing():
            self._held = memoryview(b"")
            self._bound_writing()
        elif self._held:
            self.flow.pause_reading()
        elif self.cycle is None or self.cycle.response_complete:
            # Nothing is being answered, so these were not the last bytes of a request.
            self._start_timer()

    def _check_overhead(self) -> None:
        num_overhead = self._num_received - self._num_body
        if (
            num_overhead <= MAX_HEAD_BYTES + MAX_CHUNK_OVERHEAD * self._num_body
            or self.transport.is_closing()
        ):
            return
        if self._in_head:
            self.transport.write(_TOO_LARGE)
        self._end(f"more than {MAX_HEAD_BYTES} bytes of headers")

    def _start_timer(self) -> None:
        """Start the timer, unless the headers came with their first byte, as they usually do."""
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(
                HEAD_TIMEOUT_S, self._end, f"no complete headers within {HEAD_TIMEOUT_S:g} s"
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, why: str) -> None:
        logger.debug(
            "HTTP connection ended: client=%s reason=%s", self.client and self.client[0], why
        )
        self._stop_timer()
        self._idle.pop(self, None)
        self.transport.close()
        self._bound_writing()
