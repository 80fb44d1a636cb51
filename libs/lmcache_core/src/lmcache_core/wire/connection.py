"""The client's side of one connection: matches arriving frames to waiting calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lmcache_core.concurrency import cancel_and_join
from lmcache_core.errors import (
    AuthenticationError,
    LMCacheError,
    ProtocolError,
    UnavailableError,
    VersionError,
)
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.record import Allocate, Miss
from lmcache_core.wire import messages as m
from lmcache_core.wire.frames import FrameHeader, FrameType
from lmcache_core.wire.incoming import IncomingRecord, Received
from lmcache_core.wire.lanes import LaneNumbers, runs_of
from lmcache_core.wire.messages import Message, NameRun
from lmcache_core.wire.requests import check_version, preface
from lmcache_core.wire.stream import FrameStream

logger = logging.getLogger(__name__)

MAX_UNANSWERED = 1024
_ANSWERS = frozenset(
    {
        FrameType.CONTAINS_OK,
        FrameType.CHUNK,
        FrameType.GET_END,
        FrameType.PUT_OK,
        FrameType.REMOVE_OK,
        FrameType.PONG,
        FrameType.LENT,
        FrameType.ERROR,
    }
)
_HELLO_ID = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """The content of a CHUNK frame, for the key with that index."""

    index: int
    record: Received | Miss


class Call:
    """One request that has been sent, and the frames that have arrived for it.

    Args:
        answer: Type of the frame that ends it.
        keys: For GET, the keys requested.
        allocate: For GET, allocates memory for payloads.
    """

    def __init__(
        self,
        correlation_id: int,
        answer: FrameType,
        keys: Sequence[CacheEngineKey],
        allocate: Allocate | None,
    ) -> None:
        self.correlation_id = correlation_id
        self.answer = answer
        self.keys = keys
        self.allocate = allocate
        self.items: asyncio.Queue[Arrival | Message | LMCacheError] = asyncio.Queue(
            len(keys) + 1  # each key is answered once, plus the frame that ends the call
        )
        self.seen: set[int] = set()
        self.abandoned = False
        self.received_before = 0

    def release(self) -> None:
        """Release the memory of items that were not taken."""
        while not self.items.empty():
            item = self.items.get_nowait()
            if isinstance(item, Arrival) and isinstance(item.record, Received):
                item.record.memory.ref_count_down()


class ClientConnection:
    """Sends requests and passes each arriving frame to its call.

    The reader task runs until `close`, or until the connection is lost or violates the protocol;
    then every call fails.

    Args:
        stream: A new connection.
        name: Address of the server, for messages.

    Attributes:
        max_batch: Largest number of keys in one request.
        version: Of the protocol, that of the older one of the two.
    """

    def __init__(self, stream: FrameStream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._lanes = LaneNumbers()
        self._declaring = asyncio.Lock()
        self._calls: dict[int, Call] = {}
        self._last_id = _HELLO_ID
        self._current: FrameHeader | None = None
        self._incoming: IncomingRecord | None = None
        self._reader: asyncio.Task[None] | None = None
        self.max_batch = 1
        self.server = ""
        self.version = m.VERSION_MIN

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._stream.is_open and self._reader is not None and not self._reader.done()

    async def greet(self, token: str | None, client: str, capabilities: Sequence[str] = ()) -> None:
        """Exchange HELLO and start the reader.

        Args:
            capabilities: What it takes; see `lmcache_core.wire.capabilities`.

        Raises:
            AuthenticationError: The server rejects the token.
            VersionError: There is no common version.
            ProtocolError: The answer is malformed.
            UnavailableError: The connection ended, or the server is busy.
        """
        hello = m.Hello(m.VERSION_MIN, m.VERSION_MAX, list(capabilities), token, client)
        await self._stream.send_message(_HELLO_ID, hello)
        header = await self._stream.read_header()
        if header.type not in (FrameType.HELLO_OK, FrameType.ERROR):
            raise ProtocolError(f"{self._name} answered HELLO with {header.type.name}")
        answer = await self._stream.read_message(header)
        if not isinstance(answer, m.HelloOk):
            raise self._refusal(answer)
        check_version(self._name, hello, answer)
        self.max_batch = min(answer.max_batch, m.MAX_BATCH_KEYS)
        self.server = answer.server
        self.version = answer.version
        self._reader = asyncio.create_task(self._read_frames(), name=f"lm-client/{self._name}")

    @asynccontextmanager
    async def calling(
        self,
        keys: Sequence[ChunkKey],
        question: Callable[[list[NameRun]], Message],
        answer: FrameType,
        deadline: float,
        allocate: Allocate | None = None,
    ) -> AsyncIterator[Call]:
        """Send one question about keys; take the answer inside the context, by `next_item`. If the
        body raises, the call is abandoned.

        Args:
            keys: At most `max_batch`.
            question: Returns the request, given the keys as they are named on this connection.
            answer: Type of the frame that ends the answer.
            deadline: Time of the event loop.
            allocate: For GET, allocates memory for payloads.

        Raises:
            UnavailableError: As `start`.
            TimeoutError: The deadline has passed.
        """
        call: Call | None = None
        try:
            async with asyncio.timeout_at(deadline):
                asked = () if allocate is None else [key.key for key in keys]
                message = question(await self.names(keys))
                call = await self.start(message, answer, keys=asked, allocate=allocate)
                yield call
        except TimeoutError:
            if call is not None:
                self.expire(call)
            raise
        except BaseException:
            if call is not None:
                self.abandon(call)
            raise

    async def names(self, keys: Sequence[ChunkKey]) -> list[NameRun]:
        """Return the keys in the form for a request, after declaring lanes that are new here.

        Raises:
            IdentityError: A key cannot be encoded.
            UnavailableError: The connection is lost.
        """
        runs = runs_of(key.key for key in keys)
        for lane, _ in runs:
            if lane is not None and self._lanes.declaration(lane) is not None:
                # One at a time: numbers must arrive in order, and one is valid only once its frame
                # is sent.
                async with self._declaring:
                    declared = self._lanes.declaration(lane)
                    if declared is not None:
                        await self._stream.send_message(0, declared)
                        self._lanes.add(declared)
        return self._lanes.names(runs)

    async def start(
        self,
        message: Message,
        answer: FrameType,
        *blob: bytes | memoryview,
        keys: Sequence[CacheEngineKey] = (),
        allocate: Allocate | None = None,
    ) -> Call:
        """Send a request. The caller takes its whole answer, or ends it by `abandon` or `expire`.

        Raises:
            UnavailableError: The connection is lost, or has too many unanswered requests.
        """
        if len(self._calls) >= MAX_UNANSWERED:
            self._stream.abort()
            raise UnavailableError(f"{self._name} left {MAX_UNANSWERED} requests unanswered")
        self._last_id += 1
        call = Call(self._last_id, answer, keys, allocate)
        call.received_before = self._stream.num_received
        self._calls[call.correlation_id] = call
        try:
            await self._stream.send_message(
                call.correlation_id, message, *blob, preface=preface(call.correlation_id)
            )
        except BaseException:
            # Cancelled before its first byte; after that byte the stream has been aborted.
            call.release()
            self._calls.pop(call.correlation_id, None)
            raise
        return call

    async def next_item(self, call: Call) -> Arrival | Message:
        """Return the next item for that call.

        Raises:
            UnavailableError: The connection is lost, or the server refused the request.
            AuthenticationError: The server refused the request because credentials are missing.
        """
        item = await call.items.get()
        if isinstance(item, LMCacheError):
            raise UnavailableError(f"{self._name}: {item}") from item
        if isinstance(item, m.ErrorMessage):
            raise self._refusal(item)
        return item

    def abandon(self, call: Call) -> None:
        """Release the memory of a call whose waiter is gone; frames still to come for it are
        discarded.
        """
        call.abandoned = True
        call.release()
        if (
            self._incoming is not None
            and self._current is not None
            and self._current.correlation_id == call.correlation_id
        ):
            self._incoming.drop()

    def expire(self, call: Call) -> None:
        """Abandon a call whose deadline has passed, and close the connection if it has stalled: if
        nothing has arrived since the call began, or a half-read frame belongs to no other call.
        """
        owner = self._calls.get(self._current.correlation_id) if self._current is not None else None
        is_half_read = self._current is not None or self._stream.num_staged > 0
        self.abandon(call)
        silent = self._stream.num_received == call.received_before
        if silent or (is_half_read and (owner is None or owner.abandoned)):
            self._stream.abort()

    def abort(self) -> None:
        """Close the connection immediately; every call on it fails."""
        self._stream.abort()

    async def close(self) -> None:
        """Abort the connection, join the reader, and fail all waiting calls."""
        self._stream.abort()
        if self._reader is not None:
            await cancel_and_join([self._reader])
        await self._stream.wait_closed()

    async def _read_frames(self) -> None:
        cause: LMCacheError = UnavailableError("the connection was closed")
        try:
            while True:
                header = await self._stream.read_header()
                if header.type not in _ANSWERS:
                    raise ProtocolError(f"{header.type.name} is not an answer")
                self._current = header
                message = await self._stream.read_message(header)
                await self._take(header, message)
                self._current = None
        except (ProtocolError, UnavailableError) as exc:
            cause = exc
        except Exception:
            logger.exception("reading answers failed: server=%s", self._name)
            raise
        finally:
            self._stream.abort()
            for call in self._calls.values():
                call.items.put_nowait(cause)
            self._calls.clear()

    async def _take(self, header: FrameHeader, message: Message) -> None:
        if isinstance(message, m.ErrorMessage) and header.correlation_id == 0:
            raise ProtocolError(
                f"the server closed the connection: {message.code}: {message.message}"
            )
        call = self._calls.get(header.correlation_id)
        if call is None:
            raise ProtocolError(
                f"{header.type.name} for request {header.correlation_id}, which is not open"
            )
        if isinstance(message, m.ChunkHead):
            await self._take_chunk(call, message.index, header.blob_bytes)
            return
        if header.type not in (call.answer, FrameType.ERROR):
            raise ProtocolError(f"{header.type.name} where {call.answer.name} was due")
        del self._calls[header.correlation_id]
        if not call.abandoned:
            call.items.put_nowait(message)

    async def _take_chunk(self, call: Call, index: int, blob_bytes: int) -> None:
        if call.allocate is None or index >= len(call.keys) or index in call.seen:
            raise ProtocolError(f"CHUNK {index}, which was not requested")
        call.seen.add(index)
        if call.abandoned:
            await self._stream.discard(blob_bytes)
            return
        self._incoming = IncomingRecord(self._stream, blob_bytes, call.allocate)
        try:
            record = await self._incoming.receive(call.keys[index])
        finally:
            self._incoming = None
        if not call.abandoned:
            call.items.put_nowait(Arrival(index, record))

    def _refusal(self, answer: Message) -> LMCacheError:
        if not isinstance(answer, m.ErrorMessage):
            return ProtocolError(f"{self._name} sent an unsolicited {answer.frame_type.name}")
        text = f"{self._name}: {answer.code}: {answer.message}"
        if answer.code == m.ErrorCode.AUTHENTICATION:
            return AuthenticationError(text)
        return VersionError(text) if answer.code == m.ErrorCode.VERSION else UnavailableError(text)
