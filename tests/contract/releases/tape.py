"""Stands between a client and a server, or in the place of one of them, and knows what was said
at a release.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from lmcache_core.wire.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameType,
    build_header,
    parse_header,
)

from tests.contract.releases.conversations import in_thread
from tests.fixtures.frames import read_raw

FOLDER = Path(__file__).parent
RECORDED = tuple(sorted(path.parent for path in FOLDER.glob("*/lm.json")))
Exchange = dict[str, Any]


def tape_of(release: Path, protocol: str) -> list[Exchange]:
    """What was said, one exchange after the other."""
    exchanges: list[Exchange] = json.loads((release / f"{protocol}.json").read_text())
    return exchanges


async def read_frame(reader: asyncio.StreamReader) -> tuple[FrameHeader, bytes]:
    """A whole lm:// frame."""
    head = await reader.readexactly(HEADER_BYTES)
    header = parse_header(head)
    return header, head + await reader.readexactly(header.meta_bytes + header.blob_bytes)


UNANSWERED = frozenset({FrameType.LANE, FrameType.CONTEXT})
LAST = frozenset(set(FrameType) - {FrameType.CHUNK})
"""Frames that end an answer."""


@asynccontextmanager
async def lm_server(answer: Callable[[FrameHeader, bytes], list[bytes]]) -> AsyncIterator[int]:
    """Answers each frame as told; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                for frame in answer(*await read_frame(reader)):
                    writer.write(frame)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def ask_lm(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frame: bytes
) -> list[bytes]:
    """Send a frame; all frames that answer it."""
    writer.write(frame)
    answers: list[bytes] = []
    while parse_header(frame[:HEADER_BYTES]).type not in UNANSWERED:
        header, data = await read_frame(reader)
        answers.append(data)
        if header.type in LAST:
            break
    return answers


def read_message(connection: socket.socket) -> bytes:
    """A whole frame of the sidecar's socket; b"" at the end."""
    raw = read_raw(connection)
    return build_header(raw[0]) + raw[1] if raw else b""


def is_answered(frame: bytes) -> bool:
    """Whether an answer follows a request."""
    return parse_header(frame[:HEADER_BYTES]).type not in UNANSWERED


@contextmanager
def unix_server(path: Path, answer: Callable[[bytes], bytes]) -> Iterator[None]:
    """Answers each message of one client as told."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(10.0)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while request := read_message(connection):
                    connection.sendall(answer(request))

        thread = in_thread(serve)
        yield
        thread.join(10.0)
        assert not thread.is_alive()


class Recorder(httpx.AsyncBaseTransport):
    """Notes what goes over REST."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self.exchanges: list[Exchange] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        response = await self._inner.handle_async_request(request)
        data = await response.aread()
        self.exchanges.append(
            {
                "method": request.method,
                "path": request.url.raw_path.decode(),
                "headers": _kept(request.headers),
                "body": body.hex(),
                "status": response.status_code,
                "answer_type": response.headers.get("content-type", ""),
                "answer": data.hex(),
            }
        )
        return httpx.Response(response.status_code, headers=response.headers, content=data)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in ("content-type", "accept") if name in headers}


class Player(httpx.AsyncBaseTransport):
    """Answers as the service of the release did.

    Args:
        exchanges: What was said.
        change: Applied to each answer before it is sent.
    """

    def __init__(
        self,
        exchanges: list[Exchange],
        change: Callable[[str, bytes], bytes] = lambda kind, data: data,
    ) -> None:
        self._left = list(exchanges)
        self._change = change
        self.asked: list[tuple[Exchange, httpx.Request, bytes]] = []

    @property
    def is_over(self) -> bool:
        """Whether everything has been asked."""
        return not self._left

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = self._left.pop(0)
        self.asked.append((exchange, request, await request.aread()))
        data = bytes.fromhex(exchange["answer"])
        kind = exchange["answer_type"]
        return httpx.Response(
            exchange["status"],
            headers={"content-type": kind},
            content=self._change(kind, data) if data else data,
        )
