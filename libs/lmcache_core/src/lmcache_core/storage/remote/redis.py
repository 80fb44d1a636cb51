"""The remote tier in Redis: each chunk is one value, its record."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from lmcache_core._typing import override
from lmcache_core.concurrency import cancel_and_join
from lmcache_core.config.options import DATABASE_RULE, is_database
from lmcache_core.errors import ConfigError, ProtocolError, RecordError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import (
    MAX_HEAD_BYTES,
    PREFIX_BYTES,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordReason,
    Result,
    decode_head,
    decode_prefix,
)
from lmcache_core.storage.remote.base import (
    RemoteBackend,
    RemoteOptions,
    is_damaged,
)
from lmcache_core.storage.sealing import seal_all
from lmcache_core.storage.unusable import UnusableRecords
from lmcache_core.wire.incoming import IncomingRecord, OversizedBlobError, Received
from lmcache_core.wire.stream import STAGED_READ_BYTES, FrameStream

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
AHEAD_BYTES = 64 << 20
"""Replies that Redis may have to buffer for one of our calls."""
ASSUMED_RECORD_BYTES = 8 << 20
"""Assumed size until the first record has been read."""
MAX_SKIPPED_BYTES = 1 << 20
"""A longer value that is no record is not read to its end: its connection is given up instead, and
the value is removed.
"""
BATCH_KEYS = 256
DEFAULT_SENTINEL_PORT = 26379
KEY_PREFIX = "lmc"
TTL_OPTION = "ttl_s"

_JUDGE = """
if redis.sha1hex(redis.call('GETRANGE', KEYS[1], 0, ARGV[2] - 1)) ~= ARGV[1] then return 0 end
if redis.call('STRLEN', KEYS[1]) ~= tonumber(ARGV[3]) then return 0 end
if ARGV[4] == '1' then redis.call('UNLINK', KEYS[1]) end
return 1
"""
"""Return whether a value begins with the bytes that a reader saw and has the length that it was
told, and remove it if it does and the reader wants that. What is between a reader and Redis may
answer with other bytes, and another host may have replaced the value since.
"""
_REMOVE_OTHER_TYPE = """
if redis.call('TYPE', KEYS[1]).ok == 'string' then return 0 end
redis.call('UNLINK', KEYS[1])
return 1
"""
"""Remove a value that is a list, a hash or the like, and so no record."""
OTHER_TYPE = -1
"""Stands for the size of such a value."""


def create(url: str, options: RemoteOptions) -> RedisBackend:
    """Return the backend for a `redis://`, `rediss://` or `redis-sentinel://` URL.

    Raises:
        ConfigError: The URL is malformed.
    """
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    ttl_text = query.pop(TTL_OPTION, ["0"])[-1]
    query.pop("protocol", None)  # see `Replies`
    if not ttl_text.isascii() or not ttl_text.isdigit():
        raise ConfigError(
            f"remote_url: {TTL_OPTION}={ttl_text!r} must be whole seconds, 0 for no expiry"
        )
    sentinels: list[redis.Redis] = []
    try:
        if parts.scheme == "redis-sentinel":
            client, sentinels = _sentinel_clients(
                parts.netloc, parts.path.strip("/") or "mymaster", options.timeout_s
            )
        else:
            if not is_database(parts.path):
                raise ValueError(f"database {parts.path[1:]!r}: {DATABASE_RULE}")
            bare = parts._replace(query=urlencode(query, doseq=True)).geturl()
            pool = redis.BlockingConnectionPool.from_url(
                bare, timeout=options.timeout_s, **_connection_options(options.timeout_s)
            )
            client = redis.Redis.from_pool(pool)
    except ValueError as exc:
        raise ConfigError(
            f"remote_url={parts.scheme}://{parts.netloc.rpartition('@')[2]}: {exc}"
        ) from exc
    return RedisBackend(client, options.timeout_s, int(ttl_text), sentinels)


class RedisBackend(RemoteBackend):
    """Chunks in Redis, at `lmc:<tenant>:<url key>`. Everything read is verified before it enters
    the process.

    A get or a put takes one round trip for any number of chunks: requests are pipelined. Redis is
    asked for at most about `AHEAD_BYTES` ahead of what has been read, judging by the size of the
    last record. Payloads move between the socket and the chunks' memory without another copy.

    A value that fails a check is reported as absent and replaced by the next store. It is removed
    only if Redis itself vouches for the bytes (see `_JUDGE`), and they are the record of its name
    but for its own digest, or no record and either of another type or so long that each read of it
    costs others their time.

    Args:
        client: Client without response decoding; closed with this tier.
        ttl_s: Expiry of a chunk from its last store, 0 for none.
        sentinels: Clients that find Redis for `client`; closed with this tier.
    """

    failures = (RedisError, ProtocolError)

    def __init__(
        self,
        client: redis.Redis,
        timeout_s: float,
        ttl_s: int = 0,
        sentinels: Sequence[redis.Redis] = (),
    ) -> None:
        super().__init__("redis")
        self._timeout_s = timeout_s
        self._client = client
        self._sentinels = sentinels
        self._ttl_s = ttl_s
        self._record_bytes = ASSUMED_RECORD_BYTES
        self._unusable = UnusableRecords()

    async def close(self) -> None:
        """Close the connections."""
        async with self._mapped(self._timeout_s):
            for client in (self._client, *self._sentinels):
                await client.aclose(close_connection_pool=True)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        async with self._mapped(self._timeout_s):
            return [
                bool(found) and key not in self._unusable
                for key, found in zip(
                    keys,
                    await self._pipelined([("EXISTS", _name(key)) for key in keys]),
                    strict=True,
                )
            ]

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks. A value that fails a check is read a second time: this host's memory may be
        faulty.
        """

        async def read(results: list[Result | None]) -> None:
            ends_at = asyncio.get_running_loop().time() + self._timeout_s
            suspected: dict[int, int] = {}
            async with self._mapped(self._timeout_s):
                await self._get(keys, allocate, results, suspected)
            found = {i: results[i] for i in suspected}
            for i in suspected:
                results[i] = Miss(MissReason.UNAVAILABLE)  # until Redis vouches for what was read
                self._unusable.note(keys[i])
            with contextlib.suppress(UnavailableError):  # what was read is served all the same
                async with self._mapped(ends_at - asyncio.get_running_loop().time()):
                    for i, size in suspected.items():
                        results[i] = await self._judge(keys[i], size, found[i])

        return await self._collect(len(keys), timeout_s, read)

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks. A value that Redis refuses (out of memory, read-only) is False."""
        expiry = ("EX", self._ttl_s) if self._ttl_s else ()
        stored = [False] * len(chunks)
        await seal_all(chunks)
        requests = [
            encoded("SET", _name(chunk.key), (chunk.head, chunk.memory.byte_array), *expiry)
            for chunk in chunks
        ]

        async def read(i: int, replies: Replies) -> bytes | ResponseError:
            return await replies.read()

        async def note(i: int, reply: bytes | ResponseError) -> None:
            stored[i] = reply == b"+OK"

        if requests:
            async with self._mapped(self._timeout_s):
                await exchange(self._client, requests, lambda: MAX_AHEAD, read, note)
        self._unusable.forget(
            chunk.key for chunk, is_stored in zip(chunks, stored, strict=True) if is_stored
        )
        self._stored_chunks += sum(stored)
        return stored

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        async with self._mapped(self._timeout_s):
            return sum(
                int(count)
                for count in await self._pipelined([("UNLINK", _name(key)) for key in keys])
            )

    @override
    async def clear(self, tenant: str | None = None) -> int:
        """Remove everything. Walks the whole key space; each step has the deadline of a call."""
        pattern = f"{KEY_PREFIX}:*" if tenant is None else f"{KEY_PREFIX}:{tenant}:*"
        num_removed = 0
        cursor = -1
        while cursor:
            async with self._mapped(self._timeout_s):
                cursor, names = await self._client.scan(
                    max(cursor, 0), match=pattern, count=BATCH_KEYS
                )
                num_removed += await self._client.unlink(*names) if names else 0
        return num_removed

    async def _get(
        self,
        keys: Sequence[ChunkKey],
        allocate: Allocate,
        results: list[Result | None],
        suspected: dict[int, int],
    ) -> None:
        """Fill in results, and note places and sizes of values that are no record of their
        names.
        """
        sizes: dict[int, int] = {}
        received: dict[int, Received] = {}
        begin = 0

        async def read(number: int, replies: Replies) -> None:
            i = begin + number
            size = await replies.read_size()
            if isinstance(size, ResponseError):
                if not str(size).startswith("WRONGTYPE"):
                    raise size
                results[i], suspected[i] = Miss(MissReason.CORRUPT), OTHER_TYPE
            elif size is not None:
                sizes[i] = size
                record: Received | Miss
                try:
                    record = await IncomingRecord(
                        replies, size, allocate, MAX_SKIPPED_BYTES
                    ).receive(keys[i].key)
                except OversizedBlobError:
                    results[i] = Miss(MissReason.CORRUPT)
                    suspected[i] = sizes[i]
                    raise EndOfReplies from None
                self._record_bytes = max(size, 1)
                try:
                    await replies.end()
                except BaseException:
                    if isinstance(record, Received):
                        record.memory.ref_count_down()
                    raise
                if isinstance(record, Received):
                    received[i] = record
                else:
                    results[i] = record
                    if record.reason is not MissReason.NO_MEMORY:
                        suspected[i] = sizes[i]

        async def check(number: int, reply: None) -> None:
            i = begin + number
            if i in received:
                results[i] = await received.pop(i).verified(keys[i], STORAGE_TIER)
                if isinstance(results[i], Miss):
                    suspected[i] = sizes[i]
                else:
                    self._unusable.forget([keys[i]])

        try:
            while begin < len(keys):
                num_read = await exchange(
                    self._client,
                    [encoded("GET", _name(key)) for key in keys[begin:]],
                    lambda: AHEAD_BYTES // self._record_bytes,
                    read,
                    check,
                )
                begin += num_read + 1  # the reply that ended them counts, too
        finally:
            for one in received.values():
                one.memory.ref_count_down()

    async def _judge(self, key: ChunkKey, size: int, result: Result | None) -> Result | None:
        """Return the miss for a value that failed a check, and remove the value if it may be."""
        name = _name(key)
        if size == OTHER_TYPE:
            await self._client.eval(_REMOVE_OTHER_TYPE, 1, name)
            return result
        head: Any = await self._client.getrange(name, 0, MAX_HEAD_BYTES - 1)
        if not head:
            return result  # empty, or deleted by another process
        if _is_of_another_version(head):
            self._unusable.forget([key])
            return result
        seen: Any = head
        may_go = size > MAX_SKIPPED_BYTES
        if _is_head_of(head, key, size):
            whole: Any = await self._client.get(name)
            seen = whole
            if seen is None:
                return result
            may_go = await asyncio.to_thread(is_damaged, seen, key)
            if not may_go:
                self._unusable.forget([key])
                logger.warning("two reads of a value differ, keeping it: key=%s", name)
                return Miss(MissReason.UNAVAILABLE)
        digest = hashlib.sha1(seen, usedforsecurity=False).hexdigest()
        if await self._client.eval(_JUDGE, 1, name, digest, len(seen), size, int(may_go)):
            return result
        logger.warning("Redis does not vouch for a value that was read, keeping it: key=%s", name)
        return Miss(MissReason.UNAVAILABLE)

    async def _pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        answers: list[Any] = []
        for begin in range(0, len(commands), BATCH_KEYS):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands[begin : begin + BATCH_KEYS]:
                pipeline.execute_command(*command)
            answers += await pipeline.execute()
        return answers


def _connection_options(timeout_s: float) -> dict[str, Any]:
    """Omit the socket timeout: with one, the client waits by `asyncio.wait_for`, which in Python
    3.11 can swallow a cancellation.

    Calls have a deadline of their own.
    """
    return {
        "max_connections": MAX_CONNECTIONS,
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 1),
        "decode_responses": False,
        "protocol": 2,
    }


def _sentinel_clients(
    netloc: str, service: str, timeout_s: float
) -> tuple[redis.Redis, list[redis.Redis]]:
    credentials, _, hosts = netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    sentinels = []
    for address in hosts.split(","):
        host, _, port = address.partition(":")
        if not host:
            raise ValueError("a sentinel without a host")
        sentinels.append((host, int(port or DEFAULT_SENTINEL_PORT)))
    options = _connection_options(timeout_s) | {
        "username": unquote(user) or None,
        "password": unquote(password) or None,
    }
    share_s = timeout_s / len(sentinels)
    limits = {
        "socket_timeout": share_s,
        "socket_connect_timeout": share_s,
        "retry": Retry(NoBackoff(), 0),
    }
    sentinel = SteadySentinels(sentinels, sentinel_kwargs=limits)  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(service, **options)
    return client, list(sentinel.sentinels)


def _name(key: ChunkKey) -> str:
    return f"{KEY_PREFIX}:{key.tenant}:{key.key.to_url()}"


def _is_head_of(head: bytes, key: ChunkKey, size: int) -> bool:
    try:
        prefix = decode_prefix(head[:PREFIX_BYTES])
        decode_head(head[: prefix.head_bytes], key.key)
    except RecordError:
        return False
    return prefix.head_bytes + prefix.payload_bytes == size


def _is_of_another_version(record: bytes) -> bool:
    """Return whether a refused record is of a later version, which other readers can still use."""
    try:
        decode_head(record[: decode_prefix(record[:PREFIX_BYTES]).head_bytes])
    except RecordError as exc:
        return exc.reason in (RecordReason.VERSION, RecordReason.EXTENSION)
    return False


MAX_AHEAD = 256
"""Largest number of requests without a reply."""
MAX_LINE_BYTES = STAGED_READ_BYTES
"""Longest line of a reply: a status, an error, or the length of a value."""
NOT_READY = ("LOADING", "NOAUTH", "MASTERDOWN")
"""Errors that refuse every command."""

Request = Sequence[bytes | memoryview]
T = TypeVar("T")


class EndOfReplies(Exception):
    """Raised by the reader of an exchange: it takes no further reply."""


class Replies(FrameStream):
    """The socket of a connection of redis-py, for requests and replies that are not copied.

    redis-py has connected it (addresses, sentinels, TLS, login); its own reader would copy each
    byte of a reply three times. RESP2 only: RESP3 may send other messages between
    replies.

    Args:
        connection: Connected and idle.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self._lent: asyncio.Transport = connection._writer.transport
        self._lender = self._lent.get_protocol()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Receive what the connection does."""
        self._pass_to(self)
        self.connection_made(self._lent)
        try:
            yield
        finally:
            self._pass_to(self._lender)
            if self._closed.is_set():
                self._lender.connection_lost(None)

    async def read(self) -> bytes | ResponseError:
        """Read one line of a reply, without its end; an error as one.

        Raises:
            UnavailableError: The connection ended, or Redis refuses every command.
            ProtocolError: It is no line.
        """
        line = await self.read_line(MAX_LINE_BYTES)
        if line[-1:] != b"\r":
            raise ProtocolError(f"Redis answered {line[:64]!r}")
        if line[:1] != b"-":
            return line[:-1]
        error = line[1:-1].decode(errors="replace")
        if error.startswith(NOT_READY):
            raise UnavailableError(f"Redis: {error}")
        return ResponseError(error)

    async def read_size(self) -> int | ResponseError | None:
        """Read the reply to a GET up to the value, and return its size; None without one. Raises as
        `read`.
        """
        line = await self.read()
        if isinstance(line, ResponseError):
            return line
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit():
            raise ProtocolError(f"Redis answered a GET with {line[:64]!r}")
        return int(line[1:])

    async def end(self) -> None:
        """Read the end of a value. Raises as `read`."""
        if await self.read():
            raise ProtocolError("Redis sent a longer value than announced")

    def _pass_to(self, protocol: asyncio.BaseProtocol) -> None:
        self._lent.set_protocol(protocol)
        if not self._lent.is_closing():
            self._lent.set_write_buffer_limits()


Read = Callable[[int, Replies], Awaitable[T]]
OnReply = Callable[[int, T], Awaitable[None]]


async def exchange(
    client: redis.Redis,
    requests: Sequence[Request],
    num_ahead: Callable[[], int],
    read: Read[T],
    on_reply: OnReply[T],
) -> int:
    """Send requests over one connection, and read and handle each reply as it arrives: one round
    trip in total. One reply is handled while the next one is read.

    A connection that is lost before the first reply is replaced once, so requests must be safe to
    send twice.

    Args:
        num_ahead: Returns how many may be without a reply; queried repeatedly, clamped to
            1..`MAX_AHEAD`.
        read: Reads the reply to the request of that number, to its end; or raises `EndOfReplies`,
            and the connection is closed with whatever else it would bring.
        on_reply: Called with the number of a request and what `read` returned; never concurrently.

    Returns:
        How many replies were handled.

    Raises:
        RedisError: No connection could be made.
        UnavailableError: The connection ended.
        ProtocolError: A reply is malformed.
    """
    pool = client.connection_pool
    for is_last in (False, True):
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        handler = _Handler(on_reply)
        try:
            replies = Replies(connection)
            with replies.borrowed():
                num_sent = 0
                for i in range(len(requests)):
                    end = min(i + min(max(num_ahead(), 1), MAX_AHEAD), len(requests))
                    parts = (part for request in requests[num_sent:end] for part in request)
                    await replies.send(*_merged(parts))
                    num_sent = max(num_sent, end)
                    try:
                        reply = await read(i, replies)
                    except EndOfReplies:
                        break
                    await handler.take(reply)
                await handler.join()
            return handler.num_taken
        except UnavailableError:
            if is_last or handler.num_taken or replies.is_open:
                raise
        finally:
            try:
                await handler.close()
            finally:  # even if a second deadline passes here: the pool has few connections
                if handler.num_taken < len(requests):
                    # Later replies on it would be taken for those of another request.
                    await connection.disconnect(nowait=True)
                await pool.release(connection)
    raise AssertionError("the last attempt returns or raises")


class _Handler(Generic[T]):
    """Handles one reply while the next one is being read."""

    def __init__(self, on_reply: OnReply[T]) -> None:
        self._on_reply = on_reply
        self._task: asyncio.Future[None] | None = None
        self.num_taken = 0

    async def take(self, reply: T) -> None:
        await self.join()
        self._task = asyncio.ensure_future(self._on_reply(self.num_taken, reply))
        self.num_taken += 1

    async def join(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            try:
                await task
            finally:
                task.cancel()

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_join([self._task])


def encoded(*words: bytes | str | int | Sequence[bytes | memoryview]) -> Request:
    """Return a command in the Redis protocol; a sequence of buffers is one word, and is not
    copied.
    """
    request: list[bytes | memoryview] = [b"*%d\r\n" % len(words)]
    for word in words:
        parts = (
            [str(word).encode()]
            if isinstance(word, str | int)
            else [word]
            if isinstance(word, bytes)
            else list(word)
        )
        request += [b"$%d\r\n" % sum(len(part) for part in parts), *parts, b"\r\n"]
    return request


def _merged(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes with small parts joined."""
    small = bytearray()
    for part in parts:
        if len(part) <= STAGED_READ_BYTES:
            small += part
            continue
        if small:
            yield bytes(small)
            small = bytearray()
        yield part
    if small:
        yield bytes(small)


class SteadySentinels(Sentinel):
    """redis-py's sentinels, without losing any.

    redis-py moves the sentinel that answered to the front of its list. Two concurrent calls may
    then list one sentinel twice and drop another, which is never asked again and never closed. Here
    each call has a list of its own.
    """

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the master; see `Sentinel.discover_master`."""
        own = copy.copy(self)
        own.sentinels = list(self.sentinels)
        found: tuple[str, int] = await Sentinel.discover_master(own, service_name)
        self.sentinels = own.sentinels
        return found
