"""A server of the lm:// protocol: its listener, and the session of each connection, which reads
frames in order and answers requests concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import (
    AuthenticationError,
    CapacityError,
    LMCacheError,
    ProtocolError,
    SerdeError,
    UnavailableError,
)
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, Miss, MissReason, release_all
from lmcache_core.security import Principal, owner_of, speaks_for_all_tenants
from lmcache_core.security.handshakes import BoundedContext
from lmcache_core.serde.stated_size import check_stated_size
from lmcache_core.telemetry.request_context import Carried, working_for
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.telemetry.tracing import Tracer
from lmcache_core.wire import messages
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.frames import WITH_RECORD, FrameHeader, FrameType
from lmcache_core.wire.incoming import IncomingRecord, Received
from lmcache_core.wire.listener import FrameListener
from lmcache_core.wire.loans import Lender, Loans
from lmcache_core.wire.messages import ANY_SERVER, ErrorCode, ErrorMessage, Message
from lmcache_core.wire.requests import RequestReader
from lmcache_core.wire.served import (
    AdaptsToClients,
    Authenticate,
    HandoverLog,
    ServedStore,
    ServerLimits,
    TakesHandovers,
    VerifyTicket,
)
from lmcache_core.wire.stream import FrameStream

logger = logging.getLogger(__name__)

TIER = "lm"
PACE_PAUSE_S = 0.02

_REQUESTS = WITH_RECORD | {
    FrameType.CONTAINS,
    FrameType.GET,
    FrameType.REMOVE,
    FrameType.PING,
    FrameType.HELD,
    FrameType.LEND,
    FrameType.GIVE_BACK,
}


class LmServer(FrameListener):
    """Listens for lm:// connections and serves a store to them.

    Args:
        store: The store to serve; may implement `AdaptsToClients` or `TakesHandovers`.
        authenticate: Maps HELLO's token to its owner, for example `TokenTable.authenticate`.
        port: 0 picks a free one; see `port`.
        verify_ticket: Checks tickets, for example `TicketVerifier.verify`; with it, connections
            without a token may GET by ticket.
        name: Name of this server in HELLO_OK, by which clients tell servers apart.

    Attributes:
        log: Logs what clients can cause arbitrarily often.
        lender: Makes chunks readable for movers of clients; None: they get bytes alone.
    """

    def __init__(
        self,
        store: ServedStore,
        authenticate: Authenticate,
        host: str = "127.0.0.1",
        port: int = 0,
        verify_ticket: VerifyTicket | None = None,
        limits: ServerLimits | None = None,
        name: str = ANY_SERVER,
    ) -> None:
        self.store = store
        self.authenticate = authenticate
        self.verify_ticket = verify_ticket
        self.limits = limits or ServerLimits()
        self.name = name
        self.log = SparseLog(logger)
        self.tracer: Tracer | None = None
        self.lender: Lender | None = None
        self._address = (host, port)
        super().__init__(
            "lm server",
            self.limits.max_connections,
            partial(LmSession, self),
            self._turned_away,
            ErrorMessage(ErrorCode.BUSY.value, "too many connections"),
            self.limits.max_strangers,
        )

    async def open(self, tls: ssl.SSLContext | None = None, tracer: Tracer | None = None) -> None:
        """Listen.

        Args:
            tls: Encrypts every connection, as created by `server_context`; None: no encryption.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        self.tracer = tracer
        if tls is None:
            await self.listen(*self._address)
        else:
            handshake_s = self.limits.hello_timeout_s
            bounded = BoundedContext(tls, self.limits.max_handshakes, handshake_s)
            await self.listen(*self._address, bounded, handshake_s)

    def _turned_away(self, stream: FrameStream) -> None:
        message = "lm connection turned away, too many are open: client=%s num_connections=%d"
        self.log.log(logging.WARNING, message, stream.peer(), self.num_connections)


class LmSession:
    """Serves one connection."""

    def __init__(self, server: LmServer, stream: FrameStream) -> None:
        self._server = server
        self._stream = stream
        self._limits = server.limits
        self._store = server.store  # as seen by this client, from HELLO on
        # Twice, since ending requests still count there.
        self._requests = TaskSupervisor("lm-session", 2 * self._limits.max_in_flight)
        self._free_slots = asyncio.Semaphore(self._limits.max_in_flight)
        self._num_underway = 0
        self._reader = RequestReader(_REQUESTS, self._next_header, self._read_message)
        self._arrived: dict[int, Received | Miss] = {}
        self._handovers: TakesHandovers | None = None
        self._handed_over = HandoverLog(self._limits.note_handovers, stream.peer())
        lender = server.lender
        self._loans = None if lender is None else Loans(lender, self._limits.transfer_s)
        self._caller: Principal | None = None
        self._token: str | None = None
        self._check_again_at = math.inf
        self._client = ""
        self._is_draining = False

    async def run(self) -> None:
        """Serve until the client leaves, violates the protocol or falls silent. Releases
        everything.
        """
        try:
            await self._greet()
            await self._serve()
            await self._requests.close(self._limits.transfer_timeout_s)
        except CapacityError as exc:
            await self._stream.say_goodbye(ErrorMessage.about(exc))
        except (ProtocolError, AuthenticationError) as exc:
            message = "lm connection refused: client=%s reason=%s"
            self._server.log.log(logging.INFO, message, self._stream.peer(), exc)
            await self._stream.say_goodbye(ErrorMessage.about(exc))
        except (UnavailableError, TimeoutError) as exc:
            logger.debug("lm connection ended: client=%s reason=%s", self._stream.peer(), exc)
        finally:
            await self._requests.close()
            for correlation_id in list(self._arrived):
                self._drop_record(correlation_id)
            self._handed_over.flush()
            if self._loans is not None:
                self._loans.close()
            await self._stream.end()

    def drain(self) -> None:
        """Accept no more requests; the connection ends when those underway are answered."""
        self._is_draining = True
        if not self._num_underway:
            self._stream.close()

    async def _greet(self) -> None:
        server = self._server
        async with asyncio.timeout(self._limits.hello_timeout_s):
            header = await self._stream.read_header()
            hello, version = await self._reader.hello(header)
        self._client = hello.client
        try:
            caller = server.authenticate(hello.token)
            self._require_place(owner_of(caller))
            self._caller, self._token = caller, hello.token
            self._check_again_at = time.monotonic() + self._limits.reauthenticate_s
        except AuthenticationError:
            if server.verify_ticket is None or hello.token is not None:
                raise
        if (
            self._caller is not None
            and speaks_for_all_tenants(self._caller.role)
            and isinstance(server.store, TakesHandovers)
        ):
            self._handovers = server.store
        if isinstance(server.store, AdaptsToClients):
            self._store = server.store.for_client(Accepts.said_by(hello.capabilities))
        await self._send(
            header.correlation_id,
            messages.HelloOk(version, server.name, self._limits.max_batch),
        )

    def _require_place(self, owner: str) -> None:
        if not self._server.let_in(self._stream, owner):
            raise CapacityError("too many connections")

    async def _serve(self) -> None:
        limits = self._limits
        while True:
            await self._free_slots.acquire()
            header = await self._reader.next()
            if header is None:
                return
            self._check_token()
            if header.blob_bytes > limits.max_blob_bytes:
                raise ProtocolError(
                    f"a blob of {header.blob_bytes} bytes; the limit is {limits.max_blob_bytes}"
                )
            async with self._stream.paced(limits.transfer_s):
                message = await self._stream.read_message(header)
                if header.type in WITH_RECORD:
                    await self._receive_record(header, message)
            carried, tracer = self._reader.carried, self._server.tracer
            work: AbstractContextManager[None] = nullcontext()
            if carried is not None or tracer is not None:
                work = _traced(f"lm {header.type.name}", carried, tracer)
            answer = self._answer(header.correlation_id, message, work)
            if not self._requests.start(header.type.name, answer):
                raise UnavailableError("this session accepts no more requests")
            self._num_underway += 1

    def _check_token(self) -> None:
        """Check that the token is still the caller's: since HELLO it may have been revoked, or
        assigned to another caller.

        Raises:
            AuthenticationError: It is not.
        """
        now = time.monotonic()
        if self._caller is None or now < self._check_again_at:
            return
        self._check_again_at = now + self._limits.reauthenticate_s
        caller = self._server.authenticate(self._token)
        is_less = self._handovers is not None and not speaks_for_all_tenants(caller.role)
        if caller.tenant != self._caller.tenant or is_less:
            raise AuthenticationError(
                "the token belongs to another tenant or role now; connect again"
            )

    async def _read_message(self, header: FrameHeader) -> Message:
        async with asyncio.timeout(self._limits.transfer_s(0)):
            return await self._stream.read_message(header)

    async def _next_header(self) -> FrameHeader | None:
        """Return the next frame's header; None if the session accepts no more."""
        while not self._is_draining:
            try:
                async with asyncio.timeout(self._limits.idle_timeout_s):
                    header = await self._stream.read_header()
            except TimeoutError:
                if not self._num_underway or self._stream.num_staged:
                    raise
            else:
                return header
        return None

    async def _receive_record(self, header: FrameHeader, message: Message) -> None:
        """Receive the record of a PUT or HANDOVER. It stays in `_arrived` until its request has
        been answered.
        """
        if isinstance(message, messages.HandoverChunk) and self._handovers is None:
            self._handed_over.add(self._caller, message.tenant, 0, False)
            if self._caller is not None:
                raise AuthenticationError(_refused("HANDOVER"))
        if self._caller is None:
            await self._stream.discard(header.blob_bytes)  # `_answer` refuses the request
            return
        tenant, refusal = self._caller.tenant, None
        if isinstance(message, messages.HandoverChunk) and self._handovers is not None:
            if not await self._admitted(tenant):
                refusal = MissReason.UNAVAILABLE
            elif not message.may_evict and not self._handovers.has_room(header.blob_bytes):
                refusal = MissReason.NO_MEMORY
            tenant = message.tenant
        if refusal is not None:
            await self._stream.discard(header.blob_bytes)
            self._arrived[header.correlation_id] = Miss(refusal)
            return
        allocate = partial(self._store.allocate, tenant=tenant)
        record = IncomingRecord(self._stream, header.blob_bytes, allocate)
        self._arrived[header.correlation_id] = await record.receive(None)

    async def _admitted(self, tenant: str) -> bool:
        """Return whether a chunk being handed over is admitted. Waits for admission: its sender may
        shut down before it can retry.
        """
        admit = self._limits.admit
        deadline = time.monotonic() + self._limits.pace_s
        while admit is not None:
            try:
                admit(tenant)
            except CapacityError:
                if time.monotonic() >= deadline:
                    return False
                await asyncio.sleep(PACE_PAUSE_S)
            else:
                break
        return True

    def _drop_record(self, correlation_id: int) -> None:
        record = self._arrived.pop(correlation_id, None)
        if isinstance(record, Received):
            record.memory.ref_count_down()

    async def _answer(
        self, correlation_id: int, message: Message, work: AbstractContextManager[None]
    ) -> None:
        try:
            with work:
                await self._send(correlation_id, await self._answer_to(correlation_id, message))
        except LMCacheError as exc:
            if self._stream.is_open:
                with contextlib.suppress(UnavailableError, TimeoutError):
                    await self._send(correlation_id, ErrorMessage.about(exc))
        except TimeoutError:
            self._stream.abort()
        except Exception:
            self._stream.abort()
            raise
        finally:
            self._drop_record(correlation_id)
            self._free_slots.release()
            self._num_underway -= 1
            if self._is_draining and not self._num_underway:
                self._stream.close()

    async def _answer_to(self, correlation_id: int, message: Message) -> Message:
        """Serve a request; return the frame that ends its answer."""
        match message:
            case messages.Ping():
                return messages.Pong()
            case messages.Contains() | messages.Held():
                return messages.ContainsOk(await self._present(message))
            case messages.Get():
                keys = self._keys(message)
                return await self._send_chunks(correlation_id, keys, message.prefix_only)
            case messages.Lend():
                return await self._lend(self._keys(message))
            case messages.GiveBack():
                if self._loans is not None:
                    self._loans.take_back(message.loans)
                return messages.Pong()
            case messages.Remove():
                return messages.RemoveOk(await self._store.remove(self._keys(message)))
            case messages.Put():
                tenant = self._tenant_for(message)
                return await self._keep(correlation_id, tenant, None, self._store.put)
            case messages.HandoverChunk():
                return await self._take_over(correlation_id, message)
        raise AssertionError(f"{message.frame_type.name} is not a request")

    async def _take_over(
        self, correlation_id: int, message: messages.HandoverChunk
    ) -> messages.PutOk:
        if self._handovers is None:
            raise AuthenticationError(_refused("HANDOVER"))
        record, is_kept = self._arrived[correlation_id], False
        stored_at = time.time() - message.age_ms / 1000
        try:
            answer = await self._keep(
                correlation_id, message.tenant, stored_at, self._handovers.take_over
            )
            is_kept = answer.stored
        finally:
            num_bytes = record.memory.get_size() if isinstance(record, Received) else 0
            self._handed_over.add(self._caller, message.tenant, num_bytes, is_kept)
        return answer

    async def _keep(
        self,
        correlation_id: int,
        tenant: str,
        stored_at: float | None,
        keep: Callable[[Chunk], Awaitable[bool]],
    ) -> messages.PutOk:
        """Verify and store the record that came with a request."""
        record = self._arrived[correlation_id]
        if isinstance(record, Miss):
            return messages.PutOk(False, record.reason.value)
        if not await record.is_whole():
            return messages.PutOk(False, MissReason.CORRUPT.value)
        try:
            check_stated_size(record.header, record.memory.byte_array)
        except SerdeError:
            return messages.PutOk(False, MissReason.CORRUPT.value)
        key = ChunkKey.of(tenant, record.header.engine_key())
        chunk = Chunk(key, record.header, record.head, record.memory, TIER)
        chunk.stored_at = stored_at
        is_kept = await keep(chunk)
        return messages.PutOk(is_kept, "" if is_kept else MissReason.NO_MEMORY.value)

    async def _present(self, message: messages.Contains | messages.Held) -> list[bool]:
        keys = self._keys(message)
        present = await self._store.contains(keys)
        if isinstance(message, messages.Held) and (store := self._handovers) is not None:
            return [found and store.stays(key) for key, found in zip(keys, present, strict=True)]
        return present

    async def _send_chunks(
        self, correlation_id: int, keys: Sequence[ChunkKey], prefix_only: bool
    ) -> messages.GetEnd:
        misses: list[tuple[int, str]] = []
        size = self._limits.get_batch
        for begin in range(0, len(keys), size):
            batch = keys[begin : begin + size]
            results = await self._store.get(batch)
            try:
                for index, (_, result) in enumerate(zip(batch, results, strict=True), begin):
                    if isinstance(result, Chunk):
                        head = messages.ChunkHead(index)
                        blob = (result.head, result.memory.byte_array)
                        await self._send(correlation_id, head, *blob)
                    else:
                        misses.append((index, result.reason.value))
                        if prefix_only:
                            break
            finally:
                release_all(results)
            if prefix_only and misses:
                break
        return messages.GetEnd(misses)

    async def _lend(self, keys: Sequence[ChunkKey]) -> messages.Lent:
        lender = self._server.lender
        blob = b"" if lender is None else lender.blob
        if not blob or self._loans is None:
            return messages.Lent(b"", ("",) * len(keys))
        items: list[messages.Loan | str] = []
        for begin in range(0, len(keys), self._limits.get_batch):
            results = await self._store.get(keys[begin : begin + self._limits.get_batch])
            try:
                items += [
                    result.reason.value
                    if isinstance(result, Miss)
                    else self._loans.lend(result) or ""
                    for result in results
                ]
            finally:
                release_all(results)
        return messages.Lent(blob, tuple(items))

    def _keys(
        self,
        message: messages.Contains | messages.Held | messages.Get | messages.Lend | messages.Remove,
    ) -> list[ChunkKey]:
        tenant = self._tenant_for(message)
        return self._reader.lanes.keys(message.names, tenant, self._limits.max_batch)

    def _tenant_for(self, message: Message) -> str:
        """Return the tenant of a request, and count it against the caller's rate. A ticket counts
        only on a connection without a token, and only for GET and LEND.
        """
        if isinstance(message, messages.Held) and self._handovers is None:
            raise AuthenticationError(_refused("HELD"))
        if self._caller is None:
            tenant = self._tenant_by_ticket(message)
            self._require_place(tenant)
        else:
            tenant = self._caller.tenant
        if self._limits.admit is not None:
            self._limits.admit(tenant)
        return message.tenant if isinstance(message, messages.Held) else tenant

    def _tenant_by_ticket(self, message: Message) -> str:
        verify = self._server.verify_ticket
        shown = message.ticket if isinstance(message, messages.Get | messages.Lend) else None
        if verify is None or shown is None:
            raise AuthenticationError(
                f"{message.frame_type.name} needs a token, or where tickets are taken GET with a"
                " ticket"
            )
        ticket = verify(shown)
        if ticket.requester != self._client:
            raise AuthenticationError("the ticket is for another requester")
        return ticket.tenant

    async def _send(self, correlation_id: int, message: Message, *blob: bytes | memoryview) -> None:
        async with asyncio.timeout(self._limits.transfer_s(sum(map(len, blob)))):
            await self._stream.send_message(correlation_id, message, *blob)


def _refused(frame: str) -> str:
    return f"{frame} needs a storage server, and a token with the role storage or admin"


@contextmanager
def _traced(name: str, carried: Carried | None, tracer: Tracer | None) -> Iterator[None]:
    with working_for(name, carried, tracer):
        yield
        logger.debug("request answered: request=%s", name)
