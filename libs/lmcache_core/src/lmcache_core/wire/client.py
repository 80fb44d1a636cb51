"""A client of an lm:// server: one connection with many concurrent requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lmcache_core.concurrency.supervisor import cancel_and_join
from lmcache_core.errors import LMCacheError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.security import ClientTls, ShownToken, token_text, why_silent
from lmcache_core.wire import messages as m
from lmcache_core.wire.backoff import Backoff
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.connection import Arrival, Call, ClientConnection
from lmcache_core.wire.failures import reaching
from lmcache_core.wire.frames import FrameType
from lmcache_core.wire.messages import Message, NameRun
from lmcache_core.wire.stream import FrameStream

DEFAULT_PORT = 65432

Announce = Callable[[Chunk], Message]
Question = Callable[[list[NameRun]], Message]
A = TypeVar("A", bound=Message)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of a client.

    Attributes:
        timeout_s: Deadline of a call without its own.
        connect_timeout_s: Deadline of connecting and HELLO, independent of the deadline of the call
            that needed it first.
        put_window: Concurrent PUTs without an answer.
        name: Name of this client, for the server's logs and for tickets.
        tier: Name of the tier that chunks from here are attributed to.
        tls: Encrypts, and verifies the server; None: neither.
    """

    timeout_s: float = 5.0
    connect_timeout_s: float = 1.0
    put_window: int = 8
    backoff_initial_s: float = 0.05
    backoff_cap_s: float = 5.0
    name: str = ""
    tier: str = STORAGE_TIER
    accepts: Accepts = ONLY_LOSSLESS
    tls: ClientTls | None = None


class LmClient:
    """Speaks lm:// to one server.

    It connects on demand and again after a loss, limited by its back-off: until then calls fail
    immediately. Calls may run concurrently and may be cancelled. All raise `UnavailableError` if
    the server cannot be reached, refuses, or does not answer by their deadline, and
    `AuthenticationError` or `ProtocolError` if that is the cause.

    Args:
        token: Bearer token, None for none; a token file is re-read for each connection.

    Attributes:
        server: The name that the server gave when it was last reached; None before.
    """

    def __init__(
        self,
        host: str,
        port: int = DEFAULT_PORT,
        token: ShownToken = None,
        options: ClientOptions | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._options = options or ClientOptions()
        self._name = f"{'lm' if self._options.tls is None else 'lm+tls'}://{host}:{port}"
        self._backoff = Backoff(
            self._options.backoff_initial_s, self._options.backoff_cap_s, time.monotonic
        )
        self._connection: ClientConnection | None = None
        self._attempt: asyncio.Task[ClientConnection] | None = None
        self._is_closed = False
        self.server: str | None = None

    @property
    def is_connected(self) -> bool:
        """Whether a connection is currently open."""
        return self._connection is not None and self._connection.is_open

    async def ping(self, timeout_s: float | None = None) -> None:
        """Check that the server responds."""
        deadline = self._deadline(timeout_s)
        await self._ask(await self._connect(deadline), (), lambda _: m.Ping(), m.Pong, deadline)

    async def contains(
        self, keys: Sequence[ChunkKey], timeout_s: float | None = None
    ) -> list[bool]:
        """Return which of these chunks the server has now."""
        return await self._ask_for(keys, m.Contains, timeout_s)

    async def holds(
        self, tenant: str, keys: Sequence[ChunkKey], timeout_s: float | None = None
    ) -> list[bool]:
        """Return which of a tenant's chunks the server has and keeps. Needs the role `storage` or
        `admin`.
        """
        return await self._ask_for(keys, lambda names: m.Held(tenant, names), timeout_s)

    async def _ask_for(
        self, keys: Sequence[ChunkKey], question: Question, timeout_s: float | None
    ) -> list[bool]:
        answers = await self._ask_in_batches(keys, question, m.ContainsOk, timeout_s)
        return [is_there for answer in answers for is_there in answer.present]

    async def get(
        self,
        keys: Sequence[ChunkKey],
        allocate: Allocate,
        prefix_only: bool = False,
        ticket: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Fetch chunks and verify each. The caller owns the chunks returned.

        Args:
            prefix_only: Stop at the first missing chunk.
            ticket: A broker's ticket, if the server requires one.
            timeout_s: Chunks that have not arrived by then are misses with reason `deadline`.

        Returns:
            One result per key, in order. If the connection is lost underway, the rest are misses.
        """
        deadline = self._deadline(timeout_s)
        try:
            connection = await self._connect(deadline)
        except _NotConnectedYetError:
            return [Miss(MissReason.DEADLINE)] * len(keys)
        results: list[Result] = []
        try:
            while len(results) < len(keys):
                batch = keys[len(results) : len(results) + connection.max_batch]
                got, is_complete = await self._fetch(
                    connection, batch, allocate, prefix_only, ticket, deadline
                )
                results += got
                last = results[-1]
                if isinstance(last, Miss) and (prefix_only or not is_complete):
                    results += [last] * (len(keys) - len(results))
        except BaseException:
            release_all(results)
            raise
        return results

    async def _fetch(
        self,
        connection: ClientConnection,
        keys: Sequence[ChunkKey],
        allocate: Allocate,
        prefix_only: bool,
        ticket: str | None,
        deadline: float,
    ) -> tuple[list[Result], bool]:
        """Send one GET; return one result per key, and whether the server answered completely."""
        results: list[Result | None] = [None] * len(keys)
        rest, is_complete = MissReason.UNAVAILABLE, False
        question = partial(m.Get, prefix_only=prefix_only, ticket=ticket)
        try:
            async with connection.calling(
                keys, question, FrameType.GET_END, deadline, allocate
            ) as call:
                while isinstance(item := await connection.next_item(call), Arrival):
                    record = item.record
                    results[item.index] = (
                        record
                        if isinstance(record, Miss)
                        else await record.verified(keys[item.index], self._options.tier)
                    )
                assert isinstance(item, m.GetEnd), "nothing else ends a GET"
                try:
                    rest = _take_misses(item, results, prefix_only)
                except UnavailableError:
                    connection.abort()
                    raise
                is_complete = True
        except TimeoutError:
            rest = MissReason.DEADLINE
        except UnavailableError:
            pass  # the rest are misses
        except BaseException:
            release_all(results)
            raise
        return [Miss(rest) if result is None else result for result in results], is_complete

    @property
    def lends(self) -> bool:
        """Whether the server understands `borrow`, as far as it was reached."""
        return self._connection is not None and self._connection.version >= m.VERSION_LEND

    async def borrow(
        self, keys: Sequence[ChunkKey], ticket: str | None, timeout_s: float | None = None
    ) -> m.Lent:
        """Ask a server that `lends` to keep chunks where they are until `give_back`.

        Args:
            keys: No more than one batch.
        """
        deadline = self._deadline(timeout_s)
        connection = await self._connect(deadline)
        question = partial(m.Lend, ticket=ticket)
        lent = await self._ask(connection, keys, question, m.Lent, deadline)
        if len(lent.items) != len(keys):
            connection.abort()
            raise ProtocolError(f"{self._name} did not answer with one item per key")
        return lent

    async def give_back(self, loans: Sequence[int]) -> None:
        """End loans; those of an earlier connection have ended with it."""
        deadline = self._deadline(None)
        connection = await self._connect(deadline)
        await self._ask(connection, (), lambda _: m.GiveBack(tuple(loans)), m.Pong, deadline)

    async def put(self, chunks: Sequence[Chunk], timeout_s: float | None = None) -> list[bool]:
        """Store chunks (borrowed), several concurrently. True: the server has the whole, verified
        chunk.
        """
        return await self._push(chunks, lambda chunk: m.Put(), timeout_s)

    async def hand_over(
        self, chunks: Sequence[Chunk], may_evict: bool, timeout_s: float | None = None
    ) -> list[bool]:
        """Like `put`, but each chunk keeps its tenant and age. Needs the role `storage` or `admin`.

        Args:
            chunks: Borrowed.
            may_evict: Whether the server may evict others for them.
        """

        def announce(chunk: Chunk) -> Message:
            age_s = 0.0 if chunk.stored_at is None else max(0.0, time.time() - chunk.stored_at)
            return m.HandoverChunk(chunk.key.tenant, int(age_s * 1000), may_evict)

        return await self._push(chunks, announce, timeout_s)

    async def remove(self, keys: Sequence[ChunkKey], timeout_s: float | None = None) -> int:
        """Remove chunks and return how many were there."""
        answers = await self._ask_in_batches(keys, m.Remove, m.RemoveOk, timeout_s)
        return sum(answer.count for answer in answers)

    async def close(self) -> None:
        """Close the connection; later calls fail. Idempotent."""
        self._is_closed = True
        attempt = self._attempt
        if attempt is not None:
            await cancel_and_join([attempt])
        await self._drop_connection()

    async def _push(
        self, chunks: Sequence[Chunk], announce: Announce, timeout_s: float | None
    ) -> list[bool]:
        """Send chunks (borrowed), each preceded by the message that `announce` returns."""
        deadline = self._deadline(timeout_s)
        connection = await self._connect(deadline)
        unanswered: deque[Call] = deque()
        stored: list[bool] = []

        async def take_answer() -> None:
            answer = await connection.next_item(unanswered[0])
            unanswered.popleft()
            stored.append(isinstance(answer, m.PutOk) and answer.stored)

        try:
            async with asyncio.timeout_at(deadline):
                for chunk in chunks:
                    if len(unanswered) >= self._options.put_window:
                        await take_answer()
                    blob = (chunk.head, chunk.memory.byte_array)
                    unanswered.append(
                        await connection.start(announce(chunk), FrameType.PUT_OK, *blob)
                    )
                while unanswered:
                    await take_answer()
        except TimeoutError:
            for call in unanswered:
                connection.expire(call)
            raise UnavailableError(
                f"{self._name}: {len(chunks) - len(stored)} of {len(chunks)} chunks not stored in"
                " time"
            ) from None
        except BaseException:
            for call in unanswered:
                connection.abandon(call)
            raise
        return stored

    async def _ask_in_batches(
        self,
        keys: Sequence[ChunkKey],
        question: Question,
        kind: type[A],
        timeout_s: float | None,
    ) -> list[A]:
        """Ask one question about all keys, in batches as large as the server accepts."""
        deadline = self._deadline(timeout_s)
        answers: list[A] = []
        num_asked = 0
        while num_asked < len(keys):
            connection = await self._connect(deadline)
            batch = keys[num_asked : num_asked + connection.max_batch]
            answer = await self._ask(connection, batch, question, kind, deadline)
            if isinstance(answer, m.ContainsOk) and len(answer.present) != len(batch):
                connection.abort()
                raise ProtocolError(f"{self._name} did not answer with one boolean per key")
            answers.append(answer)
            num_asked += len(batch)
        return answers

    async def _ask(
        self,
        connection: ClientConnection,
        keys: Sequence[ChunkKey],
        question: Question,
        kind: type[A],
        deadline: float,
    ) -> A:
        """Ask one question about keys, at most `connection.max_batch`."""
        try:
            async with connection.calling(keys, question, kind.frame_type, deadline) as call:
                answer = await connection.next_item(call)
        except TimeoutError:
            raise UnavailableError(f"{self._name}: no {kind.frame_type.name} in time") from None
        assert isinstance(answer, kind), "the connection rejects every other type"
        return answer

    async def _connect(self, deadline: float) -> ClientConnection:
        """Return the connection. All callers wait for one attempt, which outlives them: a short
        deadline proves nothing about it.
        """
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._is_closed:
            raise UnavailableError(f"{self._name}: this client is closed")
        if self._attempt is None:
            if self._backoff.wait_s > 0:
                raise UnavailableError(
                    f"{self._name} cannot be reached; next try in {self._backoff.wait_s:.2f} s"
                )
            # The connection's log lines belong to no request, least of all to the one that happened
            # to open it.
            self._attempt = asyncio.get_running_loop().create_task(
                self._open_connection(), context=Context()
            )
            self._attempt.add_done_callback(self._attempted)
        attempt = self._attempt
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.wait([attempt])
        except TimeoutError:
            raise _NotConnectedYetError(f"{self._name} could not be reached in time") from None
        if attempt.cancelled():
            raise UnavailableError(f"{self._name}: this client was closed")
        return attempt.result()

    def _attempted(self, attempt: asyncio.Task[ClientConnection]) -> None:
        self._attempt = None
        if not attempt.cancelled():
            attempt.exception()  # retrieved, since all callers may have left

    async def _open_connection(self) -> ClientConnection:
        await self._drop_connection()
        connection: ClientConnection | None = None
        tls = self._options.tls
        try:
            with reaching(self._name):
                async with asyncio.timeout(self._options.connect_timeout_s):
                    _, stream = await asyncio.get_running_loop().create_connection(
                        FrameStream,
                        self._host,
                        self._port,
                        ssl=None if tls is None else tls.context,
                        server_hostname=None if tls is None else tls.name or self._host,
                    )
                    connection = ClientConnection(stream, self._name)
                    try:
                        await connection.greet(
                            token_text(self._token),
                            self._options.name,
                            self._options.accepts.capabilities(),
                        )
                    except UnavailableError as exc:
                        if stream.num_received:
                            raise
                        hint = why_silent(None if tls is None else tls.context)
                        raise UnavailableError(f"{self._name}: {exc}{hint}") from exc
        except BaseException as exc:
            if connection is not None:
                await connection.close()
            if isinstance(exc, LMCacheError):
                self._backoff.failed()
            raise
        self._backoff.succeeded()
        self._connection = connection
        self.server = connection.server
        return connection

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _deadline(self, timeout_s: float | None) -> float:
        return asyncio.get_running_loop().time() + (
            self._options.timeout_s if timeout_s is None else timeout_s
        )


class _NotConnectedYetError(UnavailableError):
    """The caller's deadline passed before the connection was open."""


def _take_misses(end: m.GetEnd, results: list[Result | None], prefix_only: bool) -> MissReason:
    """Record the misses that GET_END names; return the reason that applies to the other keys.

    Raises:
        UnavailableError: It violates the protocol.
    """
    reasons = [_reason(text) for _, text in end.misses]
    for (index, _), reason in zip(end.misses, reasons, strict=True):
        if index >= len(results) or results[index] is not None:
            raise UnavailableError(
                f"GET_END violates the protocol: it names key {index}, which was already answered"
                " or not requested"
            )
        results[index] = Miss(reason)
    if prefix_only and reasons:
        return reasons[0]
    if None in results:
        raise UnavailableError("GET_END violates the protocol: it leaves a key unanswered")
    return MissReason.UNAVAILABLE


def _reason(text: str) -> MissReason:
    try:
        return MissReason(text)
    except ValueError:
        return MissReason.UNAVAILABLE
