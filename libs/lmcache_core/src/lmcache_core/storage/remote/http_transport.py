"""HTTP/1.1 for bodies of megabytes: httpx' client over our own streams, which receive into memory instead of into pieces of 64 KiB."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from lmcache_core.errors import UnavailableError
from lmcache_core.wire.stream import FrameStream

MAX_HEAD_BYTES = 64 << 10
MAX_CHUNK_LINE_BYTES = 256
MAX_INTERIM_ANSWERS = 8
PIECE_BYTES = 1 << 20
MAX_REST_S = 3.0
"""A connection that has rested longer is not used again: servers end theirs after five seconds or more, and that may cross a request."""

_WITHOUT_BODY = frozenset({204, 304})
_LINE_END = b"\r\n"


@dataclass(slots=True)
class _Resting:
    stream: FrameStream
    since: float


class StreamTransport(httpx.AsyncBaseTransport):
    """Connections to one server, used again when an answer has been read to its end.

    Pieces of an answer's body are views of memory that is filled anew for the next piece.

    Args:
        tls: For https.
        max_connections: Requests underway at once; more wait.
    """

    def __init__(self, tls: ssl.SSLContext, max_connections: int) -> None:
        self._tls = tls
        self._slots = asyncio.Semaphore(max_connections)
        self._resting: list[_Resting] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        await self._slots.acquire()
        stream: FrameStream | None = None
        try:
            stream = self._rested() or await self._connect(request.url)
            await _send(stream, request)
            status, headers = await _read_head(stream)
        except BaseException as exc:
            self._give_up(stream)
            if isinstance(exc, UnavailableError):
                raise httpx.ReadError(str(exc)) from exc
            raise
        has_body = request.method != "HEAD" and status not in _WITHOUT_BODY
        return httpx.Response(status, headers=headers, stream=_Answer(self, stream, headers, has_body))

    async def aclose(self) -> None:
        """End the connections that rest. Idempotent."""
        while self._resting:
            stream = self._resting.pop().stream
            stream.abort()
            await stream.wait_closed()

    def _take_back(self, stream: FrameStream, is_usable: bool) -> None:
        """An answer has ended, well or not."""
        if is_usable and stream.is_open and not stream.num_staged:
            self._resting.append(_Resting(stream, time.monotonic()))
            self._slots.release()
        else:
            self._give_up(stream)

    def _give_up(self, stream: FrameStream | None) -> None:
        if stream is not None:
            stream.abort()
        self._slots.release()

    def _rested(self) -> FrameStream | None:
        while self._resting:
            resting = self._resting.pop()
            if resting.stream.is_open and time.monotonic() - resting.since < MAX_REST_S:
                return resting.stream
            resting.stream.abort()
        return None

    async def _connect(self, url: httpx.URL) -> FrameStream:
        is_encrypted = url.scheme == "https"
        port = url.port or (443 if is_encrypted else 80)
        try:
            _, stream = await asyncio.get_running_loop().create_connection(
                FrameStream, url.host, port, ssl=self._tls if is_encrypted else None, server_hostname=url.host if is_encrypted else None
            )
        except (OSError, UnicodeError) as exc:
            raise httpx.ConnectError(f"{url.host}:{port}: {exc}") from exc
        return stream


class _Answer(httpx.AsyncByteStream):
    """The body of one answer."""

    def __init__(self, owner: StreamTransport, stream: FrameStream, headers: httpx.Headers, has_body: bool) -> None:
        self._owner = owner
        self._stream = stream
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._length = headers.get("content-length")
        self._keeps_open = headers.get("connection", "").lower() != "close"
        self._has_body = has_body
        self._is_read = not has_body
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The body's pieces."""
        if not self._has_body:
            return
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            async for num_bytes in self._sizes():
                for at in range(0, num_bytes, PIECE_BYTES):
                    piece = buffer[: min(PIECE_BYTES, num_bytes - at)]
                    await self._stream.readinto(piece)
                    yield piece  # type: ignore[misc]  # whoever reads it copies it at once
        except UnavailableError as exc:
            raise httpx.RemoteProtocolError(f"the answer ended early: {exc}") from exc
        self._is_read = True

    async def aclose(self) -> None:
        """Use the connection again, if everything has been read. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._owner._take_back(self._stream, self._is_read and self._keeps_open)

    async def _sizes(self) -> AsyncIterator[int]:
        """Of the runs of bytes that the body comes in."""
        if not self._is_chunked:
            if self._length is None or not self._length.isdecimal():
                raise httpx.RemoteProtocolError("an answer without a length")
            yield int(self._length)
            return
        while True:
            line = await _read_line(self._stream, MAX_CHUNK_LINE_BYTES)
            size = _chunk_size(line)
            if not size:
                break
            yield size
            if await _read_line(self._stream, MAX_CHUNK_LINE_BYTES):
                raise httpx.RemoteProtocolError("a chunk that is longer than it says")
        while await _read_line(self._stream, MAX_HEAD_BYTES):
            pass  # trailers


async def _send(stream: FrameStream, request: httpx.Request) -> None:
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    await stream.send(_LINE_END.join([*lines, b"", b""]))
    assert isinstance(request.stream, httpx.AsyncByteStream)
    async for piece in request.stream:
        await stream.send(piece)


async def _read_head(stream: FrameStream) -> tuple[int, httpx.Headers]:
    for _ in range(MAX_INTERIM_ANSWERS):
        words = (await _read_line(stream, MAX_HEAD_BYTES)).split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or len(words[1]) != 3:
            raise httpx.RemoteProtocolError("what came is no answer")
        num_bytes = 0
        headers: list[tuple[bytes, bytes]] = []
        while line := await _read_line(stream, MAX_HEAD_BYTES):
            num_bytes += len(line)
            name, colon, value = line.partition(b":")
            if not colon or not name or num_bytes > MAX_HEAD_BYTES:
                raise httpx.RemoteProtocolError("a header that is none, or too many of them")
            headers.append((name.strip(), value.strip()))
        if not words[1].startswith(b"1"):
            return int(words[1]), httpx.Headers(headers)
    raise httpx.RemoteProtocolError("interim answers without end")


async def _read_line(stream: FrameStream, max_bytes: int) -> bytes:
    """A line without its end. Short reads are served from the stream's staging buffer."""
    line = bytearray()
    byte = bytearray(1)
    view = memoryview(byte)
    while not line.endswith(_LINE_END):
        if len(line) >= max_bytes:
            raise httpx.RemoteProtocolError(f"a line of more than {max_bytes} bytes")
        await stream.readinto(view)
        line += byte
    return bytes(line[:-2])


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 16 or digits.strip(b"0123456789abcdefABCDEF"):
        raise httpx.RemoteProtocolError("the size of a chunk is no number")
    return int(digits, 16)
