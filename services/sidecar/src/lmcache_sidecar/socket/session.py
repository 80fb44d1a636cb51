"""One client of the socket: the memory it holds, and the answers to its requests."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from lmcache_core.errors import (
    IdentityError,
    LayoutError,
    ProtocolError,
    RecordError,
    UnavailableError,
)
from lmcache_core.keys import CacheEngineKey, ChunkChain, ChunkKey
from lmcache_core.memory import MemoryObj
from lmcache_core.names import MEMORY_TIER, documented_tier, tier_name
from lmcache_core.record import Chunk, Miss, decode_head, release_all
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.storage.staging import Stager
from lmcache_core.telemetry.request_context import Carried, working_for
from lmcache_core.wire import messages as m
from lmcache_core.wire.capabilities import (
    ON_DEVICE,
    Accepts,
    chunk_bytes_said_by,
    role_said_by,
)
from lmcache_core.wire.frames import FrameHeader, FrameType
from lmcache_core.wire.messages import ErrorMessage, Message, NameRun
from lmcache_core.wire.requests import RequestReader
from lmcache_core.wire.stream import FrameStream

from lmcache_sidecar import metrics
from lmcache_sidecar.descriptions import MAX_NAMED_KEYS
from lmcache_sidecar.socket.client_memory import ClientMemory
from lmcache_sidecar.socket.context import SessionContext

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
MAX_FREE_REQUEST_BYTES = 128 << 10
"""A request up to this size is read without waiting for others; it can contain the names of some
thousand chunks.
"""
LARGE_REQUEST_TIMEOUT_S = 10.0
"""How long a larger request may wait for its turn and then take to arrive; clients wait less for
their answers.
"""
DECODING_S = 0.2
"""Time to decode chunks for a client even if reading them took all of its time. Clients wait a
little longer than they allow the sidecar.
"""
_REQUESTS = frozenset(
    {
        FrameType.RESERVE,
        FrameType.COMMIT,
        FrameType.LOAD,
        FrameType.STAGE,
        FrameType.EXPECT,
        FrameType.DONE,
        FrameType.REJECT,
        FrameType.DESCRIBE,
        FrameType.LOOKUP,
        FrameType.STATS,
        FrameType.PREFETCH,
        FrameType.WATCH,
        FrameType.PING,
    }
)


class EngineSession:
    """Serves one connection, one request after the other, and releases everything at its end.

    Attributes:
        staging: Its tickets.
        engine: Its description; None before HELLO and after the end.
        role: vLLM's `kv_role` of the engine; "" if it does not say.
    """

    def __init__(self, stream: FrameStream, context: SessionContext) -> None:
        self._stream = stream
        self._context = context
        self._reader = RequestReader(_REQUESTS, stream.read_header, stream.read_message)
        self._decodes: frozenset[str] = frozenset()
        self.memory = ClientMemory(context)
        self.staging = Stager(
            context.stack,
            context.tenant,
            context.staged,
            lambda lift: context.tasks.start("stage", lift),
        )
        if context.is_draining:
            self.staging.may_lift = False
        self.engine: m.EngineInfo | None = None
        self.role = ""
        self._most_bytes: int | None = None

    async def run(self) -> None:
        """Serve until the client leaves or violates the protocol, then release everything."""
        try:
            await self._talk()
            self._give_up_memory()
            # There may be many promises: let others run in between. `staging.close` releases
            # whatever a cancellation leaves.
            await self.staging.run_cooperatively(self.staging.close())
        finally:
            self._give_up_memory()
            self.staging.run(self.staging.close())
            self._stream.abort()

    def drain(self) -> None:
        """Withhold memory reserved for the client from all other use: the sidecar shuts down, and
        the client may not know yet and still write.
        """
        self.memory.abandon()

    async def _talk(self) -> None:
        try:
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    header = await self._stream.read_header()
                    hello, version = await self._reader.hello(header)
            except TimeoutError:
                return
            await self._stream.send_message(header.correlation_id, self._greet(hello, version))
            while (request := await self._reader.next()) is not None:
                if request.meta_bytes <= MAX_FREE_REQUEST_BYTES:
                    message = await self._stream.read_message(request)
                    answer = await self._answer_within(message)
                else:
                    async with self._large(request) as message:
                        answer = await self._answer_within(message)
                await self._stream.send_message(request.correlation_id, answer)
        except (ProtocolError, IdentityError, LayoutError) as exc:
            self._context.log.log(logging.WARNING, "client of the socket refused: error=%s", exc)
            # Until the client has closed its side, it may still access memory reserved or pinned
            # for it, so that memory is not reused.
            cause = ProtocolError(str(exc)) if isinstance(exc, IdentityError) else exc
            await self._stream.say_goodbye(ErrorMessage.about(cause))
            await self._stream.until_gone()
        except UnavailableError:
            if self._stream.is_open:  # a tier failed, not the connection
                await self._stream.until_gone()
                raise
            logger.debug("client of the socket disconnected")
        except Exception:
            await self._stream.until_gone()
            raise

    @asynccontextmanager
    async def _large(self, header: FrameHeader) -> AsyncIterator[Message]:
        """Return the large request with this header; the body of the context answers it. Large
        requests share a bound on memory; nothing of one is read before there is room.
        """
        num_bytes = header.meta_bytes
        async with AsyncExitStack() as room:
            reason = metrics.NO_ROOM
            try:
                async with asyncio.timeout(LARGE_REQUEST_TIMEOUT_S):
                    await room.enter_async_context(self._context.large_requests.using(num_bytes))
                    reason = metrics.TOO_SLOW
                    message = await self._stream.read_message(header)
            except TimeoutError as exc:
                self._context.counters.add(metrics.REFUSED_CLIENTS_TOTAL, 1, reason)
                cause = (
                    "other requests took all the room"
                    if reason == metrics.NO_ROOM
                    else "it had not arrived"
                )
                raise ProtocolError(
                    f"{header.type.name} of {num_bytes} bytes: {cause} after"
                    f" {LARGE_REQUEST_TIMEOUT_S:g} s; send smaller ones"
                ) from exc
            yield message

    async def _answer_within(self, request: Message) -> Message:
        """Answer within the context of the request; one that came without an id gets one, which is
        passed on to other services, too.
        """
        came = self._reader.carried or Carried()
        name = f"sidecar {request.frame_type.name}"
        carried = Carried(came.request_id or self._context.request_ids.next(), came.traceparent)
        with working_for(name, carried, self._context.tracer):
            answer = await self._answer(request)
            logger.debug("request answered: request=%s", name)
        return answer

    async def _answer(self, request: Message) -> Message:
        match request:
            case m.Lookup():
                return await self._lookup(request)
            case m.Prefetch():
                names = self._names(request.names)
                self._context.tasks.start("prefetch", self._lift(names))
            case m.ReserveExtents():
                return self._reserve(request)
            case m.Commit():
                return await self._commit(request)
            case m.LoadExtents():
                return await self._load(request)
            case m.DoneWith():
                self.memory.release(request.extents)
                await self.staging.run_cooperatively(self.staging.unstage(request.tickets))
            case m.Reject():
                num_damaged = await self.memory.reject(request.extents)
                self._context.counters.add(metrics.CORRUPT_CHUNKS_TOTAL, num_damaged)
            case m.Stage():
                return await self._stage(request)
            case m.Describe():
                _check_names(request)
                self._context.descriptions.note(request, self)
            case m.Watch():
                return self._context.changes.since(request)
            case m.Stats():
                figures = self._context.stack.stats()
                return m.StatsOk({documented_tier(tier): n for tier, n in figures.items()})
            case m.Ping():
                return m.Pong()
        return m.Ok()

    def _give_up_memory(self) -> None:
        if self.engine is not None:
            self._context.leave(self.engine)
            self.engine = None
            if self._context.readers is not None:
                self._context.readers.leave(self._decodes)
        self._context.descriptions.left(self)
        self.memory.close()

    def _greet(self, hello: m.Hello, version: int) -> m.HelloOk:
        engine = hello.engine
        if engine is None:
            raise ProtocolError("HELLO on a sidecar's socket must describe the engine")
        self._context.greet(engine)
        self.engine, self.role = engine, role_said_by(hello.capabilities)
        self.staging.most_bytes = self._most_bytes = chunk_bytes_said_by(hello.capabilities)
        context = self._context
        if context.readers is not None:
            self._decodes = Accepts.said_by(hello.capabilities).serdes
            context.readers.join(self._decodes)
        arena = context.arena
        verify_hot = context.verify_hot
        if verify_hot == "auto":
            # On a GPU, digesting every load would take longer than the rest of it.
            verify_hot = "sampled" if ON_DEVICE in hello.capabilities else "always"
        return m.HelloOk(
            version,
            context.server,
            m.MAX_NAMES,
            m.ArenaInfo(str(arena.path), arena.size, arena.generation, verify_hot, context.salt),
        )

    async def _lookup(self, request: m.Lookup) -> m.ContainsOk:
        timeout_s = min(self._context.timeout_s, request.deadline_ms / 1000)
        tiers = await self._context.stack.batched_tiers(
            self._names(request.names), timeout_s, [*map(tier_name, request.tiers)] or None
        )
        return m.ContainsOk([tier is not None for tier in tiers])

    async def _lift(self, names: list[ChunkKey]) -> None:
        release_all(
            await self._context.stack.batched_get(
                names, self._context.timeout_s, prefix_only=True, most_bytes=self._most_bytes
            )
        )

    def _reserve(self, request: m.ReserveExtents) -> m.Extents:
        names = self._names(request.names)
        known = self._context.stack.hot.contains_many(names)
        known += [False] * (len(request.sizes) - len(known))
        if len(known) > len(request.sizes):
            raise ProtocolError(f"RESERVE of {len(request.sizes)} chunks with {len(known)} names")
        is_open = not self._context.is_draining
        sizes = [size for size, is_known in zip(request.sizes, known, strict=True) if not is_known]
        lent = iter(self.memory.reserve(sizes) if is_open else [None] * len(sizes))
        items = [NotLent.KNOWN if is_known else next(lent) or NotLent.NO_ROOM for is_known in known]
        for name, item in zip(names, items, strict=False):  # clients need not name what they store
            if isinstance(item, m.Extent):
                self.memory.promise(item.id, name)
        self._context.counters.add(metrics.REFUSED_CHUNKS_TOTAL, items.count(NotLent.NO_ROOM))
        return m.Extents(tuple(items))

    async def _commit(self, request: m.Commit) -> m.ContainsOk:
        stored = [False] * len(request.items)
        chunks: list[Chunk] = []
        places: list[int] = []
        for i, (handle, head) in enumerate(request.items):
            memory = self.memory.take(handle)
            if memory is None:
                continue
            chunk = self._described(memory, head)
            if chunk is None:
                memory.ref_count_down()
                continue
            chunks.append(chunk)
            places.append(i)
        try:
            for i, chunk, is_kept in zip(
                places, chunks, await self._context.stack.batched_put(chunks), strict=True
            ):
                stored[i] = is_kept
                self._context.counters.add(metrics.STORED_CHUNKS_TOTAL, is_kept)
                self._context.counters.add(metrics.STORED_BYTES_TOTAL, chunk.num_bytes * is_kept)
        finally:
            self.memory.settle([handle for handle, _ in request.items])
            for chunk in chunks:
                chunk.release()
            if self._context.journal is not None:
                self._context.journal.flush()
        return m.ContainsOk(stored)

    def _described(self, memory: MemoryObj, head: bytes) -> Chunk | None:
        try:
            header, payload_bytes = decode_head(head)
        except RecordError as exc:
            logger.warning("client committed a damaged record head: reason=%s", exc.reason)
            return None
        if payload_bytes != memory.get_size():
            logger.warning(
                "client committed another size than it reserved: bytes=%d reserved_bytes=%d",
                payload_bytes,
                memory.get_size(),
            )
            return None
        return Chunk(
            ChunkKey.of(self._context.tenant, header.engine_key()),
            header,
            head,
            memory,
            MEMORY_TIER,
        )

    async def _load(self, request: m.LoadExtents) -> m.Extents:
        names = self._names(request.names)
        self.memory.require_pins(len(names))
        recompute_s = request.recompute_us / 1e6 if request.recompute_us else None
        timeout_s, stack = request.deadline_ms / 1000, self._context.stack
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        got = await stack.batched_get(
            names,
            timeout_s,
            prefix_only=True,
            recompute_s=recompute_s,
            most_bytes=self._most_bytes,
        )
        if self._context.readers is not None:
            left_s = max(deadline - now(), DECODING_S)
            got = await self._context.readers.readable(
                got, self._decodes, stack, left_s, self._most_bytes
            )
        results = self.memory.fitting(got)
        counters = self._context.counters
        counters.add(metrics.REQUESTED_CHUNKS_TOTAL, len(names))
        extents: list[m.Extent | str] = []
        for result in results:
            if isinstance(result, Miss):
                counters.add(metrics.MISSED_CHUNKS_TOTAL, len(names) - len(extents), result.reason)
                extents.append(result.reason)
                break
            counters.add(metrics.LOADED_CHUNKS_TOTAL, 1, result.tier)
            counters.add(metrics.LOADED_BYTES_TOTAL, result.num_bytes, result.tier)
            extents.append(self.memory.pin(result))
        self._count_saved(names[: sum(isinstance(one, m.Extent) for one in extents)], request)
        return m.Extents(tuple(extents))

    def _count_saved(self, loaded: Sequence[ChunkKey], request: m.LoadExtents) -> None:
        """Count the tokens of these chunks. Other ranks and groups of layers load other parts of
        the same tokens, so those of one are counted.

        Without a group that attends to the whole prompt, these are the tokens of the widest window.
        """
        described = {known.model_name: known for known in self._context.descriptions.said_by(self)}
        if not loaded or (known := described.get(loaded[0].lane.model_name)) is None:
            return
        # Each group is loaded by a request of its own.
        counted = max(known.groups, key=_window)
        num_chunks = sum(name.lane.worker_id == 0 and name.lane.group == counted for name in loaded)
        model = self._context.model_label(known.model_name)
        counters = self._context.counters
        counters.add(metrics.SAVED_TOKENS_TOTAL, num_chunks * known.chunk_size, model)
        counters.add(
            metrics.SAVED_PREFILL_MICROSECONDS_TOTAL, num_chunks * request.recompute_us, model
        )

    async def _stage(self, request: m.Stage) -> m.Promise:
        runs = [self._reader.lanes.run(number, hashes) for number, hashes in request.chains]
        try:
            chains = [
                ChunkChain(lane.fmt, lane.model_name, lane.world_size, lane.group, hashes)
                for lane, hashes in runs
            ]
            m.check_chains(chains)
        except ValueError as exc:
            raise ProtocolError(f"STAGE: {exc}") from exc
        recompute_s = request.recompute_us / 1e6 if request.recompute_us else None
        source = request.source if isinstance(request, m.Expect) else None
        staged = await self.staging.run_cooperatively(
            self.staging.stage(
                request.ticket,
                chains,
                deadline_s=request.deadline_ms / 1000,
                is_prefix=request.is_prefix,
                recompute_s=recompute_s,
                source=source,
            )
        )
        if request.is_prefix:
            self._context.lookups.note(request.ticket, chains, staged, source)
        return m.Promise(staged.is_ready, staged.tiers)

    def _names(self, names: Sequence[NameRun]) -> list[ChunkKey]:
        return self._reader.lanes.keys(names, self._context.tenant, m.MAX_NAMES)


def _check_names(description: m.Describe) -> None:
    """Refuse a description with which no tier could encode a key, or not even one chunk could be
    named.

    Raises:
        ProtocolError: Its fields are too long, or its chunks have too many keys.
    """
    num_keys = description.world_size * len(description.groups)
    if num_keys > MAX_NAMED_KEYS:
        raise ProtocolError(
            f"a description of chunks with {num_keys} keys; the limit is {MAX_NAMED_KEYS}"
        )
    fmt, model, ranks = description.fmt, description.model_name, description.world_size
    for group in description.groups:
        CacheEngineKey(fmt, model, ranks, ranks - 1, "0" * 64, group).canonical()


def _window(group: str) -> float:
    """Return the tokens that a group of layers attends to, by its name: engines name a group with a
    sliding window `<index>:window<tokens>`.
    """
    tokens = group.partition(":window")[2]
    return int(tokens) if tokens.isdecimal() else math.inf
