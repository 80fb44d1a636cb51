"""The remote tier over cache_storage's REST API, on plain httpx, for networks that pass only HTTP;
lm:// is faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import msgspec

from lmcache_core._typing import override
from lmcache_core.concurrency import cancel_and_join
from lmcache_core.errors import ConfigError, ProtocolError, RecordError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import (
    PREFIX_BYTES,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    decode_head,
    decode_prefix,
)
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.storage.remote.base import RemoteBackend, RemoteOptions
from lmcache_core.storage.sealing import seal_all
from lmcache_core.wire.http_client import BearerAuth, context_for, http_client
from lmcache_core.wire.incoming import verified

RECORD_TYPE = "application/vnd.lmcache.record"
ACCEPT_HEADER = "LMCache-Accept"
ACCEPT_LOSSLESS = "lossless"
MAX_CONNECTIONS = 8
MAX_REST_S = 3.0
"""An idle connection is not reused after this: servers close theirs after five seconds or more,
which could collide with a request.
"""
MAX_JSON_BYTES = 1 << 20
BATCH_KEYS = 128
FEW_KEYS = 4
"""Large records are requested this many at a time: the server then states their length."""
LARGE_RECORD_BYTES = 1 << 20
SENT_AT_ONCE_BYTES = 1 << 20
"""Size of the pieces of a body; the HTTP library copies each piece that it sends."""
MAX_SENDING_BYTES = 64 << 20
"""Bound on the bodies sent at the same time. Two of 32 MiB keep a connection busy; eight evict one
another from the processor's cache.
"""

_NOT_STORED = frozenset({408, 409, 413, 422, 429, 503, 507})
"""Statuses with which a healthy server refuses a PUT: no room, read-only, or this record. Reads are
not affected.
"""


class _Present(msgspec.Struct):
    present: list[bool]


_PRESENT = msgspec.json.Decoder(_Present)


def create(url: str, options: RemoteOptions) -> HttpBackend:
    """Return the backend for an `http://` or `https://` URL.

    Raises:
        ConfigError: The URL is malformed or names several hosts.
    """
    parts = urlsplit(url)
    if "," in parts.netloc:
        raise ConfigError(
            f"remote_url={parts.scheme}://…: several hosts; write lm://host:port,host:port, which"
            " finds each chunk at its server, or the one host that is meant"
        )
    if not parts.hostname or parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(
            f"remote_url={parts.scheme}://{parts.hostname}: must be {parts.scheme}://host:port, and"
            " the token an option of its own"
        )
    return HttpBackend(url, options)


class HttpBackend(RemoteBackend):
    """Chunks in a cache_storage server. The tenant is the one that the server authenticated; all
    keys of one process have the same.

    Args:
        base_url: URL of the server, without `/v1`.
        options: Token, deadline and name.
        transport: Replaces real connections in tests.
    """

    failures = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, ProtocolError)

    def __init__(
        self,
        base_url: str,
        options: RemoteOptions,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(base_url)
        self._base_url = base_url
        self._options = options
        self._auth = BearerAuth(options.token, "remote_url")
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._sending = ByteGate(MAX_SENDING_BYTES)
        self._are_large = True

    async def open(self) -> None:
        """Create the client; it connects on demand."""
        headers = {"User-Agent": self._options.client_name}
        if not self._options.accepts.lossy:
            headers[ACCEPT_HEADER] = ACCEPT_LOSSLESS
        configured = self._options.tls
        tls = context_for(self._base_url, None if configured is None else configured.context)
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=MAX_REST_S)
        try:
            self._client = http_client(
                self._base_url,
                self._auth,
                self._options.timeout_s,
                tls,
                limits,
                self._transport,
                headers,
            )
        except (httpx.InvalidURL, ValueError) as exc:
            raise ConfigError(f"remote_url: {exc}") from exc

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        present: list[bool] = []
        async with self._calling() as client:
            for begin in range(0, len(keys), BATCH_KEYS):
                batch = keys[begin : begin + BATCH_KEYS]
                async with client.stream(
                    "POST", "/v1/chunks:contains", json=_url_keys(batch)
                ) as response:
                    _check(response)
                    present += _read_present(await _bounded_body(response), len(batch))
        return present

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        async def read(results: list[Result | None]) -> None:
            async with self._calling() as client:
                begin = 0
                while begin < len(keys):
                    end = min(len(keys), begin + (FEW_KEYS if self._are_large else BATCH_KEYS))
                    await self._get_batch(client, keys, range(begin, end), allocate, results)
                    begin = end

        return await self._collect(len(keys), timeout_s, read)

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Send one request per chunk, several concurrently."""
        await seal_all(chunks)
        async with self._calling() as client:
            puts = [asyncio.ensure_future(self._put(client, chunk)) for chunk in chunks]
            try:
                stored = await asyncio.gather(*puts)
            finally:
                await cancel_and_join(puts)
        self._stored_chunks += sum(stored)
        return stored

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        num_removed = 0
        async with self._calling() as client:
            for key in keys:
                async with client.stream("DELETE", f"/v1/chunks/{key.key.to_url()}") as response:
                    _check(response, also=404)
                    await _bounded_body(response)
                    num_removed += response.is_success
        return num_removed

    async def _get_batch(
        self,
        client: httpx.AsyncClient,
        keys: Sequence[ChunkKey],
        places: Sequence[int],
        allocate: Allocate,
        results: list[Result | None],
    ) -> None:
        """Read the records of one response. It omits missing chunks; each record names its key."""
        wanted: dict[bytes, list[int]] = {}
        for i in places:
            wanted.setdefault(keys[i].key.canonical(), []).append(i)
        rest: Miss | None = None
        body = _url_keys([keys[at[0]] for at in wanted.values()])
        async with client.stream(
            "POST", "/v1/chunks:get", json=body, headers={"Accept": RECORD_TYPE}
        ) as response:
            _check(response)
            records = RecordStream(response.aiter_raw())
            for _ in range(len(wanted)):
                head = await records.next_head()
                if head is None:
                    break
                self._are_large = head.payload_bytes >= LARGE_RECORD_BYTES
                at = wanted.pop(head.header.key, None)
                if at is None:
                    rest = Miss(MissReason.IDENTITY)
                    await records.skip_payload()
                    continue
                result = await records.chunk(keys[at[0]], allocate)
                for i in at:
                    results[i] = result
                    if isinstance(result, Chunk) and i != at[0]:
                        result.memory.ref_count_up()
            else:
                # Only a response that is read to its end leaves the connection open.
                await records.next_head()
            rest = Miss(MissReason.CORRUPT) if records.is_damaged else rest
        for at in wanted.values():
            for i in at:
                results[i] = rest

    async def _put(self, client: httpx.AsyncClient, chunk: Chunk) -> bool:
        headers = {"Content-Type": RECORD_TYPE, "Content-Length": str(chunk.num_bytes)}
        path = f"/v1/chunks/{chunk.key.key.to_url()}"
        async with (
            self._sending.using(chunk.num_bytes),
            client.stream("PUT", path, content=_parts(chunk), headers=headers) as response,
        ):
            is_refused = response.status_code in _NOT_STORED
            if not is_refused:
                _check(response)
            await _bounded_body(response)
            return not is_refused

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[httpx.AsyncClient]:
        if self._client is None:
            raise UnavailableError(f"{self._base_url}: this tier is not open")
        async with self._mapped(self._options.timeout_s):
            yield self._client


def _url_keys(keys: Sequence[ChunkKey]) -> dict[str, list[str]]:
    return {"keys": [key.key.to_url() for key in keys]}


def _check(response: httpx.Response, also: int = 200) -> None:
    if not response.is_success and response.status_code != also:
        raise ProtocolError(f"status {response.status_code}")


async def _bounded_body(response: httpx.Response) -> bytes:
    """Return the body, read to its end so that the connection can be reused."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_JSON_BYTES:
            raise ProtocolError(f"an answer of more than {MAX_JSON_BYTES} bytes")
    return bytes(body)


def _read_present(body: bytes, num_keys: int) -> list[bool]:
    try:
        present = _PRESENT.decode(body).present
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"contains was not answered by booleans: {exc}") from exc
    if len(present) != num_keys:
        raise ProtocolError(f"{num_keys} keys were answered by {len(present)} booleans")
    return present


async def _parts(chunk: Chunk) -> AsyncIterator[bytes]:
    yield chunk.head
    payload = chunk.memory.byte_array
    for at in range(0, len(payload), SENT_AT_ONCE_BYTES):
        yield payload[at : at + SENT_AT_ONCE_BYTES]  # type: ignore[misc]  # it is joined to bytes


SKIPPED_AT_ONCE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The head of a record whose payload comes next."""

    header: RecordHeader
    head: bytes
    payload_bytes: int


class RecordStream:
    """Reads a sequence of records from a stream.

    Args:
        pieces: Bytes of the stream, in pieces of any size. One piece is held at a time, and none is
            used after the next one is requested.

    Attributes:
        is_damaged: The stream ended within a record, or a head is invalid, so that the start of the
            next record is unknown.
    """

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._current: RecordHead | None = None
        self.is_damaged = False

    async def next_head(self) -> RecordHead | None:
        """Return the head of the next record; None at the end or if `is_damaged`."""
        assert self._current is None, "the previous payload has been neither taken nor skipped"
        if self.is_damaged:
            return None
        data = bytearray(PREFIX_BYTES)
        num_bytes = await self._fill(memoryview(data))
        if not num_bytes:
            return None
        try:
            if num_bytes < PREFIX_BYTES:
                raise EOFError
            prefix = decode_prefix(data)
            data += bytes(prefix.head_bytes - PREFIX_BYTES)
            await self._fill_whole(memoryview(data)[PREFIX_BYTES:])
            header, payload_bytes = decode_head(data)
        except (RecordError, EOFError):
            self.is_damaged = True
            return None
        self._current = RecordHead(header, bytes(data), payload_bytes)
        return self._current

    async def chunk(self, key: ChunkKey, allocate: Allocate) -> Result:
        """Return the record of the last head as the chunk of that key, verified. The caller owns
        it.
        """
        record, self._current = self._current, None
        assert record is not None, "no head has been read"
        memory = allocate(record.payload_bytes)
        if memory is None:
            await self._skip(record.payload_bytes)
            return Miss(MissReason.NO_MEMORY)
        try:
            await self._fill_whole(memory.byte_array)
        except BaseException as exc:
            memory.ref_count_down()
            if not isinstance(exc, EOFError):
                raise
            self.is_damaged = True
            return Miss(MissReason.CORRUPT)
        return await verified(key, record.header, record.head, memory, STORAGE_TIER)

    async def skip_payload(self) -> None:
        """Read and discard the payload of the last head."""
        record, self._current = self._current, None
        assert record is not None, "no head has been read"
        await self._skip(record.payload_bytes)

    async def _skip(self, num_bytes: int) -> None:
        dropped = memoryview(bytearray(min(num_bytes, SKIPPED_AT_ONCE_BYTES)))
        while num_bytes and not self.is_damaged:
            part = dropped[:num_bytes]
            self.is_damaged = await self._fill(part) < len(part)
            num_bytes -= len(part)

    async def _fill_whole(self, view: memoryview) -> None:
        if await self._fill(view) < len(view):
            raise EOFError

    async def _fill(self, view: memoryview) -> int:
        """Fill `view` from the stream and return the number of bytes, fewer only at the end."""
        at = 0
        while at < len(view):
            while not len(self._piece):
                piece = await anext(self._pieces, None)
                if piece is None:
                    return at
                self._piece = memoryview(piece)
            taken = min(len(view) - at, len(self._piece))
            view[at : at + taken] = self._piece[:taken]
            self._piece = self._piece[taken:]
            at += taken
        return at
