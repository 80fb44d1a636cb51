"""HTTP/1.1 for bodies of megabytes: httpx' client over our own streams, which receive into
memory instead of into pieces of 64 KiB.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from lmcache_core.errors import ProtocolError, UnavailableError
from lmcache_core.storage.remote.http_stream import LINE_END, LineStream
from lmcache_core.storage.remote.record_stream import Body, PiecedBody

MAX_HEAD_BYTES = 64 << 10
MAX_CHUNK_LINE_BYTES = 256
MAX_INTERIM_ANSWERS = 8
PIECE_BYTES = 64 << 10
MAX_REST_S = 3.0
"""A connection that has rested longer is not used again: servers end theirs after five seconds
or more, and that may cross a request.
"""

_WITHOUT_BODY = frozenset({204, 304})
_BODY = "lmcache_body"


@dataclass(slots=True)
class _Resting:
    stream: LineStream
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
        stream: LineStream | None = None
        try:
            stream = self._rested() or await self._connect(request.url)
            await _send(stream, request)
            status, headers = await _read_head(stream)
        except BaseException as exc:
            self._give_up(stream)
            if isinstance(exc, UnavailableError):
                raise httpx.ReadError(str(exc)) from exc
            if isinstance(exc, ProtocolError):
                raise httpx.RemoteProtocolError(str(exc)) from exc
            raise
        has_body = request.method != "HEAD" and status not in _WITHOUT_BODY
        answer = _Answer(self, stream, headers, has_body)
        return httpx.Response(status, headers=headers, stream=answer, extensions={_BODY: answer})

    async def aclose(self) -> None:
        """End the connections that rest. Idempotent."""
        while self._resting:
            stream = self._resting.pop().stream
            stream.abort()
            await stream.wait_closed()

    def _take_back(self, stream: LineStream, is_usable: bool) -> None:
        """An answer has ended, well or not."""
        if is_usable and stream.is_open and not stream.num_staged:
            self._resting.append(_Resting(stream, time.monotonic()))
            self._slots.release()
        else:
            self._give_up(stream)

    def _give_up(self, stream: LineStream | None) -> None:
        if stream is not None:
            stream.abort()
        self._slots.release()

    def _rested(self) -> LineStream | None:
        while self._resting:
            resting = self._resting.pop()
            if resting.stream.is_open and time.monotonic() - resting.since < MAX_REST_S:
                return resting.stream
            resting.stream.abort()
        return None

    async def _connect(self, url: httpx.URL) -> LineStream:
        is_encrypted = url.scheme == "https"
        port = url.port or (443 if is_encrypted else 80)
        try:
            _, stream = await asyncio.get_running_loop().create_connection(
                LineStream,
                url.host,
                port,
                ssl=self._tls if is_encrypted else None,
                server_hostname=url.host if is_encrypted else None,
            )
        except (OSError, UnicodeError) as exc:
            raise httpx.ConnectError(f"{url.host}:{port}: {exc}") from exc
        return stream


def body_of(response: httpx.Response) -> Body:
    """The body of an answer that is being streamed, whatever its transport: over ours it is
    received where it belongs.
    """
    body = response.extensions.get(_BODY)
    return body if isinstance(body, Body) else PiecedBody(response.aiter_raw())


class _Answer(httpx.AsyncByteStream):
    """The body of one answer: a `Body`, or pieces."""

    def __init__(
        self, owner: StreamTransport, stream: LineStream, headers: httpx.Headers, has_body: bool
    ) -> None:
        self._owner = owner
        self._stream = stream
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._length = headers.get("content-length")
        self._keeps_open = headers.get("connection", "").lower() != "close"
        self._num_left = 0
        self._is_begun = False
        self._is_read = not has_body
        self._is_closed = False

    async def fill(self, view: memoryview) -> int:
        """See `Body.fill`."""
        at = 0
        try:
            while at < len(view) and await self._more():
                num_bytes = min(self._num_left, len(view) - at)
                await self._stream.readinto(view[at : at + num_bytes])
                self._num_left -= num_bytes
                at += num_bytes
        except UnavailableError as exc:
            raise httpx.RemoteProtocolError(f"the answer ended early: {exc}") from exc
        except ProtocolError as exc:
            raise httpx.RemoteProtocolError(str(exc)) from exc
        return at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The body's pieces."""
        buffer = memoryview(bytearray(PIECE_BYTES))
        while num_bytes := await self.fill(buffer):
            yield buffer[:num_bytes]  # type: ignore[misc]  # whoever reads it copies it at once

    async def aclose(self) -> None:
        """Use the connection again, if everything has been read. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._owner._take_back(self._stream, self._is_read and self._keeps_open)

    async def _more(self) -> bool:
        """Have a run of bytes at hand; False at the end."""
        if self._num_left or self._is_read:
            return not self._is_read
        if self._is_chunked:
            await self._next_chunk()
        elif self._is_begun:
            self._is_read = True
        elif self._length is None or not self._length.isdecimal():
            raise httpx.RemoteProtocolError("an answer without a length")
        else:
            self._num_left = int(self._length)
        self._is_begun = True
        self._is_read = self._is_read or not self._num_left
        return not self._is_read

    async def _next_chunk(self) -> None:
        if self._is_begun and await self._stream.read_line(MAX_CHUNK_LINE_BYTES):
            raise httpx.RemoteProtocolError("a chunk that is longer than it says")
        self._num_left = _chunk_size(await self._stream.read_line(MAX_CHUNK_LINE_BYTES))
        if not self._num_left:
            while await self._stream.read_line(MAX_HEAD_BYTES):
                pass  # trailers


async def _send(stream: LineStream, request: httpx.Request) -> None:
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    await stream.send(LINE_END.join([*lines, b"", b""]))
    assert isinstance(request.stream, httpx.AsyncByteStream)
    async for piece in request.stream:
        await stream.send(piece)


async def _read_head(stream: LineStream) -> tuple[int, httpx.Headers]:
    for _ in range(MAX_INTERIM_ANSWERS):
        words = (await stream.read_line(MAX_HEAD_BYTES)).split(b" ", 2)
        if (
            len(words) < 2
            or not words[0].startswith(b"HTTP/1.")
            or not words[1].isdigit()
            or len(words[1]) != 3
        ):
            raise httpx.RemoteProtocolError("what came is no answer")
        num_bytes = 0
        headers: list[tuple[bytes, bytes]] = []
        while line := await stream.read_line(MAX_HEAD_BYTES):
            num_bytes += len(line)
            name, colon, value = line.partition(b":")
            if not colon or not name or num_bytes > MAX_HEAD_BYTES:
                raise httpx.RemoteProtocolError("a header that is none, or too many of them")
            headers.append((name.strip(), value.strip()))
        if not words[1].startswith(b"1"):
            return int(words[1]), httpx.Headers(headers)
    raise httpx.RemoteProtocolError("interim answers without end")


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 16 or digits.strip(b"0123456789abcdefABCDEF"):
        raise httpx.RemoteProtocolError("the size of a chunk is no number")
    return int(digits, 16)
