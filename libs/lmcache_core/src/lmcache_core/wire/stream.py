"""A byte stream that receives straight into the caller's memory and sends with backpressure."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from lmcache_core._typing import override
from lmcache_core.errors import ProtocolError, UnavailableError
from lmcache_core.wire.frames import HEADER_BYTES, FrameHeader, parse_header
from lmcache_core.wire.messages import ErrorMessage, Message, build_frame, parse_meta

STAGING_BYTES = 64 << 10
STAGED_READ_BYTES = 4 << 10
SLICE_BYTES = 1 << 20
GOODBYE_TIMEOUT_S = 1.0

OnOpen = Callable[["FrameStream"], None]


class FrameStream(asyncio.BufferedProtocol):
    """One connection, read by one reader.

    A read of more than `STAGED_READ_BYTES` receives from the socket straight into the given memory;
    only bytes staged before are copied. Short reads go through a staging buffer of `STAGING_BYTES`,
    so that a header does not cost a system call. While there is no reader and the staging buffer is
    full, the socket is not read.

    Works with any asyncio transport: TCP, Unix, TLS.

    Args:
        on_open: Called when the connection is up, on the event loop.
    """

    def __init__(self, on_open: OnOpen | None = None) -> None:
        self._on_open = on_open
        self._buffer = bytearray(STAGING_BYTES)
        self._staging = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._target: memoryview | None = None
        self._num_missing = 0
        self._num_wanted = 0
        self._reader: asyncio.Future[None] | None = None
        self._read_paused = False
        self._writer: asyncio.Future[None] | None = None
        self._write_paused = False
        self._send_lock = asyncio.Lock()
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()
        self.num_received = 0

    @property
    def num_staged(self) -> int:
        """Bytes received but not read yet."""
        return self._end - self._start

    @property
    def is_open(self) -> bool:
        """Whether bytes can still be sent."""
        return (
            self._transport is not None
            and not self._closed.is_set()
            and not self._transport.is_closing()
        )

    def peer(self) -> str:
        """Address of the other side, for logs."""
        return (
            str(self._transport.get_extra_info("peername")) if self._transport else "not connected"
        )

    async def readinto(self, view: memoryview) -> None:
        """Fill `view`. Cancelling a short read loses nothing; cancelling a long one aborts the
        connection.

        Raises:
            UnavailableError: The connection ended first.
        """
        if len(view) > STAGED_READ_BYTES:
            num_staged = min(self.num_staged, len(view))
            self._unstage(view[:num_staged])
            await self._receive(len(view) - num_staged, view[num_staged:])
            return
        view[:] = await self._staged(len(view))

    async def read_line(self, max_bytes: int) -> bytes:
        """Read up to the next line feed, and return what precedes it. May be cancelled without
        harm.

        Args:
            max_bytes: Longest line, with its end; less than `STAGING_BYTES`.

        Raises:
            ProtocolError: The line is longer.
            UnavailableError: The connection ended.
        """
        while (end := self._buffer.find(b"\n", self._start, self._end)) < 0:
            if self.num_staged >= max_bytes:
                raise ProtocolError(f"a line is longer than {max_bytes} bytes")
            self._num_wanted = self.num_staged + 1
            try:
                await self._wait_for_bytes()
            finally:
                self._num_wanted = 0
        line = bytes(self._staging[self._start : end])
        self._consume(len(line) + 1)
        return line

    async def discard(self, num_bytes: int) -> None:
        """Read that many bytes and drop them. Raises as `readinto`; cancelling it aborts the
        connection.
        """
        num_staged = min(self.num_staged, num_bytes)
        self._consume(num_staged)
        await self._receive(num_bytes - num_staged, None)

    def paced(self, transfer_s: Callable[[int], float]) -> AbstractAsyncContextManager[None]:
        """Bound the time of reads by the bytes received, not by those announced: see `paced`."""
        return paced(transfer_s, lambda: self.num_received)

    def forget_target(self) -> None:
        """Make the long read that is underway drop its bytes: its memory is not touched from here
        on.
        """
        self._target = None

    async def read_header(self) -> FrameHeader:
        """Read the next frame's header. May be cancelled without harm.

        Raises:
            ProtocolError: It is not a frame header.
            UnavailableError: The connection ended.
        """
        return parse_header(await self._staged(HEADER_BYTES))

    async def read_message(self, header: FrameHeader) -> Message:
        """Read the meta that follows that header. Raises as `read_header`.

        Cancelling it leaves the connection open, in the middle of a frame.
        """
        if header.meta_bytes <= STAGED_READ_BYTES:
            return parse_meta(header.type, await self._staged(header.meta_bytes))
        meta = bytearray(header.meta_bytes)
        view = memoryview(meta)
        for at in range(0, len(view), STAGED_READ_BYTES):
            await self.readinto(view[at : at + STAGED_READ_BYTES])
        return parse_meta(header.type, meta)

    async def send_message(
        self, correlation_id: int, message: Message, *blob: bytes | memoryview, preface: bytes = b""
    ) -> None:
        """Send one frame directly after its preface. Raises as `send`."""
        frame = preface + build_frame(correlation_id, message, sum(len(part) for part in blob))
        if blob and len(blob[0]) <= STAGED_READ_BYTES:
            frame += blob[0]
            blob = blob[1:]
        await self.send(frame, *blob)

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send the parts as one sequence. Views may be reused when it returns.

        Cancelled before its first byte it does nothing; cancelled later, it aborts the connection.

        Raises:
            UnavailableError: The connection has ended.
        """
        async with self._send_lock:
            began = False
            try:
                for part in parts:
                    view = memoryview(part)
                    for at in range(0, len(view), SLICE_BYTES):
                        await self._until_writable()
                        self._open_transport().write(view[at : at + SLICE_BYTES])
                        began = True
                if any(isinstance(part, memoryview) for part in parts):
                    await self._until_writable()
            except asyncio.CancelledError:
                if began:
                    self.abort()
                raise

    async def until_gone(self) -> None:
        """Send no more, and discard input until the other side has closed the connection."""
        if self.is_open and self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        with contextlib.suppress(UnavailableError):
            while True:
                await self.discard(STAGING_BYTES)

    def close(self) -> None:
        """Send what is buffered, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close immediately; buffered bytes are lost."""
        if self._transport is not None:
            self._transport.abort()

    async def say_goodbye(self, message: ErrorMessage) -> None:
        """Send the other side the reason why its connection ends, if it reads in time."""
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self.send_message(0, message)

    async def end(self) -> None:
        """Flush buffered bytes, for a short while, and close."""
        self.close()
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self.wait_closed()
        except TimeoutError:
            self.abort()
            await self.wait_closed()

    async def wait_closed(self) -> None:
        """Wait for the end of a connection that was closed or aborted."""
        if self._transport is not None:
            await self._closed.wait()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Writing pauses as soon as anything waits to be sent. TLS pauses from its limit on, so with
        # 0 it would pause without anything waiting.
        is_encrypted = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=int(is_encrypted))
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # No Nagle. Buffer sizes are left to the kernel: setting one disables auto-tuning, and
            # was 10 to 30 % slower over loopback.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._on_open is not None:
            self._on_open(self)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        if self._num_missing:
            if self._target is not None:
                return self._target[-self._num_missing :]
            return self._staging[: min(self._num_missing, STAGING_BYTES)]
        if self._end == STAGING_BYTES:
            num_staged = self.num_staged
            self._staging[:num_staged] = self._staging[self._start : self._end]
            self._start, self._end = 0, num_staged
        return self._staging[self._end :]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        """Record that `nbytes` have arrived."""
        self.num_received += nbytes
        if self._num_missing:
            self._num_missing -= nbytes
            if not self._num_missing:
                _wake(self._reader)
            return
        self._end += nbytes
        if self._num_wanted and self.num_staged >= self._num_wanted:
            _wake(self._reader)
        if self.num_staged == STAGING_BYTES and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    @override
    def eof_received(self) -> bool:
        """Treat a half-closed connection as closed."""
        return False

    @override
    def pause_writing(self) -> None:
        self._write_paused = True

    @override
    def resume_writing(self) -> None:
        self._write_paused = False
        _wake(self._writer)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self._target = None
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_exception(_lost(exc))

    async def _receive(self, num_bytes: int, target: memoryview | None) -> None:
        if not num_bytes:
            return
        assert self._start == self._end, "staged bytes precede these"
        self._target, self._num_missing = target, num_bytes
        try:
            await self._wait_for_bytes()
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._target, self._num_missing = None, 0

    async def _staged(self, num_bytes: int) -> bytearray:
        """Read at most `STAGED_READ_BYTES`."""
        if self._end - self._start < num_bytes:
            self._num_wanted = num_bytes
            try:
                await self._wait_for_bytes()
            finally:
                self._num_wanted = 0
        data = self._buffer[self._start : self._start + num_bytes]
        self._consume(num_bytes)
        return data

    async def _wait_for_bytes(self) -> None:
        assert self._reader is None, "a stream has one reader"
        if self._closed.is_set():
            raise _lost(None)
        self._reader = asyncio.get_running_loop().create_future()
        if self._read_paused:
            self._read_paused = False
            self._open_transport().resume_reading()
        try:
            await self._reader
        finally:
            self._reader = None

    async def _until_writable(self) -> None:
        if self._write_paused and not self._closed.is_set():
            assert self._writer is None, "the send lock admits one writer"
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    def _open_transport(self) -> asyncio.Transport:
        if self._transport is None or not self.is_open:
            raise _lost(None)
        return self._transport

    def _unstage(self, view: memoryview) -> None:
        view[:] = self._staging[self._start : self._start + len(view)]
        self._consume(len(view))

    def _consume(self, num_bytes: int) -> None:
        self._start += num_bytes
        if self._start == self._end:
            self._start = self._end = 0


@asynccontextmanager
async def paced(
    transfer_s: Callable[[int], float], num_received: Callable[[], int]
) -> AsyncIterator[None]:
    """Raise TimeoutError as soon as bytes have arrived more slowly than allowed.

    So a sender that announces much and sends little gets only the time for what it sends.

    Args:
        transfer_s: Longest time for a number of bytes.
        num_received: Bytes received, before and during this.
    """
    loop = asyncio.get_running_loop()
    began, before = loop.time(), num_received()
    next_look = loop.call_at(began + transfer_s(0), lambda: look())

    def look() -> None:
        nonlocal next_look
        due = began + transfer_s(num_received() - before)
        if due <= loop.time():
            limit.reschedule(loop.time())
        else:
            next_look = loop.call_at(due, look)

    try:
        async with asyncio.timeout(None) as limit:
            yield
    finally:
        next_look.cancel()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _lost(cause: Exception | None) -> UnavailableError:
    return UnavailableError(
        f"the connection was lost: {cause}" if cause else "the connection was closed"
    )
