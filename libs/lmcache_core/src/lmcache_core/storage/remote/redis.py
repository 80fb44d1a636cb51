"""The remote tier in Redis: each chunk is one value, its record."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import RedisError, ResponseError

from lmcache_core._typing import override
from lmcache_core.concurrency import cancel_and_join
from lmcache_core.errors import ConfigError, RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import (
    PREFIX_BYTES,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordReason,
    Result,
    decode_head,
    decode_prefix,
    payload_digest,
)
from lmcache_core.storage.remote.base import (
    RemoteBackend,
    RemoteOptions,
    chunk_from_record,
    is_damaged,
)
from lmcache_core.storage.sealing import seal_all

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
AHEAD_BYTES = 64 << 20
"""Replies that Redis may have to buffer for one of our calls."""
ASSUMED_RECORD_BYTES = 8 << 20
"""Assumed size until the first record has been read."""
BATCH_KEYS = 256
DEFAULT_SENTINEL_PORT = 26379
KEY_PREFIX = "lmc"
TTL_OPTION = "ttl_s"


def create(url: str, options: RemoteOptions) -> RedisBackend:
    """Return the backend for a `redis://`, `rediss://` or `redis-sentinel://` URL.

    Raises:
        ConfigError: The URL is malformed.
    """
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    ttl_text = query.pop(TTL_OPTION, ["0"])[-1]
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
    last record, and at most two values are in this process at a time.

    Args:
        client: Client without response decoding; closed with this tier.
        timeout_s: Deadline of a call.
        ttl_s: Expiry of a chunk from its last store, 0 for none.
        sentinels: Clients that find Redis for `client`; closed with this tier.
    """

    failures = (RedisError, OSError)

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

    async def close(self) -> None:
        """Close the connections."""
        async with self._mapped(self._timeout_s):
            for client in (self._client, *self._sentinels):
                await client.aclose(close_connection_pool=True)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        async with self._mapped(self._timeout_s):
            return [
                bool(found)
                for found in await self._pipelined([("EXISTS", _name(key)) for key in keys])
            ]

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks. A value that is a damaged record, or no record, is deleted.

        The record is read a second time before that: other hosts share Redis, and this host's
        memory may be faulty.
        """

        async def read(results: list[Result | None]) -> None:
            async with self._mapped(self._timeout_s):
                await self._get(keys, allocate, results)

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

        async def note(i: int, answer: Any) -> None:
            stored[i] = not isinstance(answer, ResponseError)

        if requests:
            async with self._mapped(self._timeout_s):
                await exchange(self._client, requests, lambda: MAX_AHEAD, note)
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
        self, keys: Sequence[ChunkKey], allocate: Allocate, results: list[Result | None]
    ) -> None:
        damaged: list[str] = []
        suspected: dict[int, bytes] = {}

        async def take(i: int, value: Any) -> None:
            if isinstance(value, ResponseError):
                if not str(value).startswith("WRONGTYPE"):
                    raise value
                results[i] = Miss(MissReason.CORRUPT)
                damaged.append(_name(keys[i]))
                return
            if value is None:
                return
            self._record_bytes = max(len(value), 1)
            results[i] = result = await chunk_from_record(value, keys[i], allocate)
            if (
                isinstance(result, Miss)
                and result.reason is not MissReason.NO_MEMORY
                and not _is_of_another_version(value)
            ):
                suspected[i] = await asyncio.to_thread(payload_digest, value)

        if keys:
            await exchange(
                self._client,
                [encoded("GET", _name(key)) for key in keys],
                lambda: AHEAD_BYTES // self._record_bytes,
                take,
            )
        again = list(suspected)

        async def judge(at: int, value: Any) -> None:
            i = again[at]
            if not isinstance(value, bytes):
                return  # deleted or replaced by another process
            if await asyncio.to_thread(
                lambda: payload_digest(value) == suspected[i] and is_damaged(value, keys[i])
            ):
                damaged.append(_name(keys[i]))
            else:
                logger.warning("two reads of a value differ, keeping it: key=%s", _name(keys[i]))
                results[i] = Miss(MissReason.UNAVAILABLE)

        if again:
            await exchange(
                self._client, [encoded("GET", _name(keys[i])) for i in again], lambda: 1, judge
            )
        if damaged:
            await self._client.unlink(*damaged)

    async def _pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to pipelined commands."""
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


def _is_of_another_version(record: bytes) -> bool:
    """Return whether a refused record is of a later version, which other readers can still use."""
    try:
        decode_head(record[: decode_prefix(record[:PREFIX_BYTES]).head_bytes])
    except RecordError as exc:
        return exc.reason in (RecordReason.VERSION, RecordReason.EXTENSION)
    return False


MAX_AHEAD = 256
"""Largest number of requests without a reply."""
SLICE_BYTES = 1 << 20
"""Bytes copied and passed to the event loop together: large enough, yet still in the processor's
cache when sent.
"""

Request = Sequence[bytes | memoryview]
OnAnswer = Callable[[int, Any], Awaitable[None]]


async def exchange(
    client: redis.Redis,
    requests: Sequence[Request],
    num_ahead: Callable[[], int],
    on_answer: OnAnswer,
) -> None:
    """Send requests over one connection and pass on each reply as it arrives: one round trip in
    total, with at most two replies in memory, one being read and one being handled.

    A connection that is lost before the first reply is replaced once, so requests must be safe to
    send twice.

    Args:
        client: Client whose connections are used.
        requests: Encoded requests.
        num_ahead: Returns how many may be without a reply; queried repeatedly, clamped to
        1..`MAX_AHEAD`.
        on_answer: Called with the number of the request and its reply, a `ResponseError` if Redis
            refuses; never concurrently.

    Raises:
        RedisError: The connection failed.
    """
    pool = client.connection_pool
    for is_last in (False, True):
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        answers = _Answers(on_answer)
        try:
            num_sent = 0
            for i in range(len(requests)):
                most = i + min(max(num_ahead(), 1), MAX_AHEAD)
                while num_sent < min(most, len(requests)):
                    for piece in _slices(requests[num_sent]):
                        await connection.send_packed_command([piece], check_health=False)
                    num_sent += 1
                try:
                    answer = await connection.read_response(disable_decoding=True)
                except ResponseError as exc:
                    answer = exc
                await answers.take(answer)
                del answer
            await answers.join()
            return
        except LostConnectionError:
            if is_last or answers.num_taken:
                raise
        finally:
            try:
                await answers.close()
            finally:  # even if a second deadline passes here: the pool has few connections
                if answers.num_taken < len(requests):
                    # Later replies on it would be taken for those of another request.
                    await connection.disconnect(nowait=True)
                await pool.release(connection)


class _Answers:
    """Handles one reply while the next one is being read."""

    def __init__(self, on_answer: OnAnswer) -> None:
        self._on_answer = on_answer
        self._task: asyncio.Future[None] | None = None
        self.num_taken = 0

    async def take(self, answer: Any) -> None:
        await self.join()
        self._task = asyncio.ensure_future(self._on_answer(self.num_taken, answer))
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


def _slices(request: Request) -> Iterator[bytes]:
    """Yield the bytes of a request: small parts joined, large ones sliced.

    These are copies, the only ones made: the event loop may hold on to what it sends after the
    caller has released the memory.
    """
    small = bytearray()
    for part in request:
        if len(small) + len(part) <= SLICE_BYTES:
            small += part
            continue
        if small:
            yield bytes(small)
            small = bytearray()
        view = memoryview(part)
        for begin in range(0, len(view), SLICE_BYTES):
            yield bytes(view[begin : begin + SLICE_BYTES])
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
