"""The server's side of one connection: reads frames in order, answers requests side by side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import (
    AuthenticationError,
    CapacityError,
    LMCacheError,
    ProtocolError,
    UnavailableError,
)
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, MissReason
from lmcache_core.security import speaks_for_all_tenants
from lmcache_core.telemetry.request_context import Carried, working_for
from lmcache_core.telemetry.tracing import Tracer
from lmcache_core.wire import messages
from lmcache_core.wire.capabilities import CONTEXT, HANDOVER, HELD, Accepts
from lmcache_core.wire.frames import WITH_RECORD, FrameHeader, FrameType
from lmcache_core.wire.intake import HandoverLog, Intake
from lmcache_core.wire.messages import ErrorMessage, Message, NameRun
from lmcache_core.wire.requests import RequestReader
from lmcache_core.wire.served import (
    AdaptsToClients,
    HasRole,
    HasTenant,
    LmService,
    ServerLimits,
    TakesHandovers,
    VerifyTicket,
)
from lmcache_core.wire.stream import FrameStream

logger = logging.getLogger(__name__)

PACE_PAUSE_S = 0.02

_REQUESTS = WITH_RECORD | {
    FrameType.CONTAINS,
    FrameType.GET,
    FrameType.REMOVE,
    FrameType.PING,
    FrameType.HELD,
}


class LmSession:
    """Serves one connection.

    Args:
        stream: The connection.
        service: What is served.
        let_in: Called when the client has shown a good token or ticket; False: there is no place
            for it.
        tracer: Traces requests; None: no traces.
    """

    def __init__(
        self,
        stream: FrameStream,
        service: LmService,
        let_in: Callable[[], bool],
        tracer: Tracer | None = None,
    ) -> None:
        self._stream = stream
        self._let_in = let_in
        self._service = service
        self._served = service.store
        self._tracer = tracer
        self._limits = service.limits
        # Twice, since requests that end are still counted there.
        self._requests = TaskSupervisor("lm-session", 2 * service.limits.max_in_flight)
        self._free_slots = asyncio.Semaphore(service.limits.max_in_flight)
        self._num_underway = 0
        self._reader = RequestReader(_REQUESTS, self._next_header, self._read_message)
        self._intake = Intake(stream)
        self._handovers: TakesHandovers | None = None
        self._neighbour: TakesHandovers | None = None
        self._handed_over = HandoverLog(service.limits.note_handovers, stream.peer())
        self._caller: HasTenant | None = None
        self._tenant: str | None = None
        self._token: str | None = None
        self._check_again_at = math.inf
        self._client = ""
        self._is_draining = False

    async def run(self) -> None:
        """Serve until the client leaves, breaks the protocol or falls silent. Gives everything
        back.
        """
        try:
            await self._greet()
            await self._serve()
            await self._requests.close(self._limits.transfer_timeout_s)
        except CapacityError as exc:
            await self._stream.say_goodbye(ErrorMessage.about(exc))
        except (ProtocolError, AuthenticationError) as exc:
            self._service.log.log(
                logging.INFO,
                "lm connection refused: client=%s reason=%s",
                self._stream.peer(),
                exc,
            )
            await self._stream.say_goodbye(ErrorMessage.about(exc))
        except (UnavailableError, TimeoutError) as exc:
            logger.debug("lm connection ended: client=%s reason=%s", self._stream.peer(), exc)
        finally:
            await self._requests.close()
            self._intake.close()
            self._handed_over.tell()
            await self._stream.end()

    def drain(self) -> None:
        """Take no more requests; the connection ends when those underway are answered."""
        self._is_draining = True
        if not self._num_underway:
            self._stream.close()

    async def _greet(self) -> None:
        async with asyncio.timeout(self._limits.hello_timeout_s):
            header = await self._stream.read_header()
            hello, version = await self._reader.hello(header)
        self._client = hello.client
        try:
            caller = self._service.authenticate(hello.token)
            self._require_place()
            self._caller, self._tenant = caller, caller.tenant
            self._let_hand_over(caller, hello.capabilities)
            self._token = hello.token
            self._check_again_at = time.monotonic() + self._limits.reauthenticate_s
        except AuthenticationError:
            if self._service.verify_ticket is None or hello.token is not None:
                raise
        agreed = self._adapt(hello.capabilities)
        await self._send(
            header.correlation_id,
            messages.HelloOk(version, agreed, self._service.name, self._limits.max_batch),
        )

    def _require_place(self) -> None:
        if not self._let_in():
            raise CapacityError("too many connections")

    def _adapt(self, capabilities: Sequence[str]) -> list[str]:
        """Serve what the client can take from now on, and return its capabilities that apply."""
        store = self._service.store
        offered = {CONTEXT} if self._handovers is None else {CONTEXT, HANDOVER, HELD}
        if isinstance(store, AdaptsToClients):
            self._served = store.for_client(Accepts.said_by(capabilities))
            offered.update(store.offers.capabilities())
        return [name for name in dict.fromkeys(capabilities) if name in offered]

    def _let_hand_over(self, caller: HasTenant, capabilities: Sequence[str]) -> None:
        """Answer a server that may end only what it can rely on; take chunks of other tenants from
        it, if its role allows that.
        """
        store = self._service.store
        if HANDOVER in capabilities and isinstance(store, TakesHandovers):
            self._neighbour = store
            self._handovers = store if _speaks_for_all(caller) else None

    async def _serve(self) -> None:
        while True:
            await self._free_slots.acquire()
            header = await self._reader.next()
            if header is None:
                return
            self._check_token()
            if header.blob_bytes > self._limits.max_blob_bytes:
                raise ProtocolError(
                    f"a blob of {header.blob_bytes} bytes; the limit is"
                    f" {self._limits.max_blob_bytes}"
                )
            async with self._stream.paced(self._limits.transfer_s):
                message = await self._stream.read_message(header)
                if header.type in WITH_RECORD:
                    await self._receive_record(header, message)
            work = self._work(header.type)
            if not self._requests.start(
                header.type.name, self._answer(header.correlation_id, message, work)
            ):
                raise UnavailableError("this session takes no more requests")
            self._num_underway += 1

    def _check_token(self) -> None:
        """Check that the token is still the caller's: it may have been withdrawn, or given to
        another, since HELLO.

        Raises:
            AuthenticationError: It has.
        """
        now = time.monotonic()
        if now < self._check_again_at:
            return
        self._check_again_at = now + self._limits.reauthenticate_s
        caller = self._service.authenticate(self._token)
        is_less = self._handovers is not None and not _speaks_for_all(caller)
        if caller.tenant != self._tenant or is_less:
            raise AuthenticationError(
                "the token belongs to another tenant or role now; connect again"
            )

    async def _read_message(self, header: FrameHeader) -> Message:
        async with asyncio.timeout(self._limits.transfer_s(0)):
            return await self._stream.read_message(header)

    def _work(self, kind: FrameType) -> AbstractContextManager[None]:
        """Return the context in which the request that has just been read is answered."""
        came = self._reader.carried
        if came is None and self._tracer is None:
            return nullcontext()
        return _traced(f"lm {kind.name}", came, self._tracer)

    async def _next_header(self) -> FrameHeader | None:
        """Return the next frame's header; None when the session takes no more."""
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
        """Take the record of a PUT or HANDOVER off the stream."""
        if isinstance(message, messages.HandoverChunk) and self._handovers is None:
            self._handed_over.add(self._caller, message.tenant, 0, False)
        if self._tenant is None:
            await self._stream.discard(header.blob_bytes)
        elif (
            isinstance(message, messages.HandoverChunk)
            and self._handovers is not None
            and not await _paced(self._limits, self._tenant)
        ):
            await self._intake.refuse(header, MissReason.UNAVAILABLE)
        else:
            await self._intake.receive(header, self._served, message, self._tenant, self._handovers)

    async def _answer(
        self, correlation_id: int, message: Message, work: AbstractContextManager[None]
    ) -> None:
        try:
            with work:
                await self._dispatch(correlation_id, message)
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
            self._free_slots.release()
            self._num_underway -= 1
            if self._is_draining and not self._num_underway:
                self._stream.close()

    async def _dispatch(self, correlation_id: int, message: Message) -> None:
        store = self._served
        match message:
            case messages.Ping():
                await self._send(correlation_id, messages.Pong())
            case messages.Contains():
                await self._send(
                    correlation_id, messages.ContainsOk(await self._present(self._keys(message)))
                )
            case messages.Held():
                keys = self._keys_of(message.names, self._tenant_of(message))
                await self._send(correlation_id, messages.ContainsOk(await self._present(keys)))
            case messages.Get():
                await self._send_chunks(correlation_id, self._keys(message), message.prefix_only)
            case messages.Remove():
                await self._send(
                    correlation_id, messages.RemoveOk(await store.remove(self._keys(message)))
                )
            case messages.Put():
                await self._send(
                    correlation_id,
                    await self._intake.put(correlation_id, store, self._tenant_for(message)),
                )
            case messages.HandoverChunk():
                await self._send(correlation_id, await self._take_over(correlation_id, message))

    async def _take_over(
        self, correlation_id: int, message: messages.HandoverChunk
    ) -> messages.PutOk:
        if self._handovers is None:
            raise AuthenticationError("HANDOVER needs a token with the role storage or admin")
        num_bytes, is_kept = self._intake.num_bytes(correlation_id), False
        try:
            answer = await self._intake.take_over(correlation_id, self._handovers, message)
            is_kept = answer.stored
        finally:
            self._handed_over.add(self._caller, message.tenant, num_bytes, is_kept)
        return answer

    async def _present(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which are there; to a server that may end, which are there to stay."""
        present = await self._served.contains(keys)
        neighbour = self._neighbour
        if neighbour is None:
            return present
        return [
            is_there and neighbour.stays(key) for key, is_there in zip(keys, present, strict=True)
        ]

    async def _send_chunks(
        self, correlation_id: int, keys: Sequence[ChunkKey], prefix_only: bool
    ) -> None:
        misses: list[tuple[int, str]] = []
        size = self._limits.get_batch
        for begin in range(0, len(keys), size):
            batch = keys[begin : begin + size]
            results = await self._served.get(batch)
            try:
                for index, (_, result) in enumerate(zip(batch, results, strict=True), begin):
                    if isinstance(result, Chunk):
                        await self._send(
                            correlation_id,
                            messages.ChunkHead(index),
                            result.head,
                            result.memory.byte_array,
                        )
                    else:
                        misses.append((index, result.reason.value))
                        if prefix_only:
                            break
            finally:
                for result in results:
                    if isinstance(result, Chunk):
                        result.release()
            if prefix_only and misses:
                break
        await self._send(correlation_id, messages.GetEnd(misses))

    def _keys(self, message: messages.Contains | messages.Get | messages.Remove) -> list[ChunkKey]:
        return self._keys_of(message.names, self._tenant_for(message))

    def _keys_of(self, names: Sequence[NameRun], tenant: str) -> list[ChunkKey]:
        return self._reader.lanes.keys(names, tenant, self._limits.max_batch)

    def _tenant_of(self, message: messages.Held) -> str:
        """The tenant that HELD names, for a caller that may speak for it."""
        if self._handovers is None:
            raise AuthenticationError("HELD needs a token with the role storage or admin")
        self._tenant_for(message)  # counts against the caller's rate
        return message.tenant

    def _tenant_for(self, message: Message) -> str:
        """In whose namespace the request is served. A ticket counts where the connection has no
        token, and for GET alone.
        """
        if self._tenant is None:
            tenant = _tenant_by_ticket(self._service.verify_ticket, self._client, message)
            self._require_place()
        else:
            tenant = self._tenant
        if self._limits.admit is not None:
            self._limits.admit(tenant)
        return tenant

    async def _send(self, correlation_id: int, message: Message, *blob: bytes | memoryview) -> None:
        async with asyncio.timeout(self._limits.transfer_s(sum(len(part) for part in blob))):
            await self._stream.send_message(correlation_id, message, *blob)


@contextmanager
def _traced(name: str, came: Carried | None, tracer: Tracer | None) -> Iterator[None]:
    with working_for(name, came, tracer):
        yield
        logger.debug("%s is answered", name)


def _speaks_for_all(caller: HasTenant) -> bool:
    return isinstance(caller, HasRole) and speaks_for_all_tenants(caller.role)


def _tenant_by_ticket(verify_ticket: VerifyTicket | None, client: str, message: Message) -> str:
    if verify_ticket is None or not isinstance(message, messages.Get) or message.ticket is None:
        raise AuthenticationError(
            f"{message.frame_type.name} needs a token, or where tickets are taken GET with a ticket"
        )
    ticket = verify_ticket(message.ticket)
    if ticket.requester != client:
        raise AuthenticationError("the ticket is for another requester")
    return ticket.tenant


async def _paced(limits: ServerLimits, tenant: str) -> bool:
    """Return whether a chunk that is handed over is admitted. It waits for that: its sender may
    end before it can try again.
    """
    deadline = time.monotonic() + limits.pace_s
    while limits.admit is not None:
        try:
            limits.admit(tenant)
        except CapacityError:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(PACE_PAUSE_S)
        else:
            break
    return True
