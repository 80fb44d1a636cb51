"""One client of the socket: its reservations, its pins, its tickets, and the answers to its
requests.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from lmcache_core.errors import ProtocolError, RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import MemoryObj
from lmcache_core.record import Chunk, Miss, decode_head
from lmcache_core.sidecar import messages as m
from lmcache_core.storage.staging import Stager

from lmcache_sidecar import metrics
from lmcache_sidecar.socket.context import SessionContext, SharedState
from lmcache_sidecar.socket.names import check_chains, check_names
from lmcache_sidecar.socket.pins import ClientPins, fit_for_one_answer
from lmcache_sidecar.socket.reservations import Reservations

VERIFY_AUTO = "auto"
logger = logging.getLogger(__name__)

MAX_REFUSAL_CHARS = 1024
HOT_TIER = "Hot"


class EngineSession:
    """State of one connection; `close` gives everything back.

    Args:
        context: What all sessions of the sidecar share.
        shared: What those of one socket have in common.
    """

    def __init__(self, context: SessionContext, shared: SharedState) -> None:
        self._context = context
        self._shared = shared
        self._ids: Iterator[int] = itertools.count(1)
        self._reservations = Reservations(context, shared.reserved, self._ids)
        self._pins = ClientPins(context.stack.hot, shared.pinned, self._ids)
        self._staging = Stager(
            context.stack,
            context.tenant,
            shared.room,
            lambda lift: context.tasks.start("stage", lift),
        )
        self._is_draining = False
        self._may_store = False
        self.hello: m.Hello | None = None

    def describe(self) -> dict[str, int | str]:
        """For the status page."""
        hello = self.hello
        return {
            "client": hello.client if hello else "",
            "pid": hello.pid if hello else 0,
            "rank": hello.rank if hello else 0,
            "world_size": hello.world_size if hello else 0,
            "model": hello.model if hello else "",
            "num_reservations": len(self._reservations),
            "reserved_bytes": self._reservations.num_bytes,
            "num_pins": len(self._pins),
            "pinned_bytes": self._pins.num_bytes,
            "num_tickets": self._staging.num_tickets,
        }

    @property
    def descriptions(self) -> tuple[m.Describe, ...]:
        """How this client names KV, as far as it has said so; the last ones."""
        return self._context.descriptions.said_by(self)

    def refuse_stores(self) -> None:
        """From now on every reservation is refused and nothing is lifted for tickets: the
        sidecar is draining.
        """
        self._is_draining = True
        self._staging.stop_lifting()

    async def expire_tickets(self) -> None:
        """Forget tickets that the client no longer speaks about."""
        await self._staging.expire_cooperatively()

    def abandon(self) -> None:
        """The sidecar ends; the client may not know yet, and goes on writing to what is reserved
        for it.
        """
        self._reservations.abandon()

    async def close_cooperatively(self) -> None:
        """`close`, with turns for others while promises are given back, which may be many.
        Cancelled, `close` does the rest.
        """
        self._give_up_memory()
        await self._staging.close_cooperatively()

    def close(self) -> None:
        """Give back every reservation, pin and promise: the client is gone. Idempotent."""
        self._give_up_memory()
        self._staging.close()

    async def answer(self, request: m.Request) -> m.Answer:
        """Do what a request says.

        Raises:
            ProtocolError: It is out of turn or names something that is not this client's; the
                connection is to be closed.
        """
        if (self.hello is None) != isinstance(request, m.Hello):
            raise ProtocolError("HELLO comes first, and once")
        match request:
            case m.Hello():
                return self._greet(request)
            case m.Lookup():
                return await self._lookup(request)
            case m.Prefetch():
                return self._prefetch(request)
            case m.Reserve():
                return self._reserve(request)
            case m.Commit():
                return await self._commit(request)
            case m.Abort():
                return self._abort(request)
            case m.Pin():
                return await self._pin(request)
            case m.Release():
                return self._release(request)
            case m.Reject():
                return await self._reject(request)
            case m.Stage():
                return await self._stage(request)
            case m.Unstage():
                await self._staging.unstage_cooperatively(request.tickets)
                return m.UnstageOk()
            case m.Describe():
                return self._describe(request)
            case m.Within():
                raise ProtocolError("a request within another one's context within a context")
            case m.Stats():
                return m.StatsOk(self._context.stack.stats())

    def _give_up_memory(self) -> None:
        if self.hello is not None:
            self._shared.leave(self.hello)
            self.hello = None
        self._context.descriptions.left(self)
        self._reservations.close()
        self._pins.close()

    def _greet(self, hello: m.Hello) -> m.Answer:
        if not hello.version_min <= m.VERSION <= hello.version_max:
            spoken = (
                f"this sidecar speaks version {m.VERSION}, the client {hello.version_min} to"
                f" {hello.version_max}"
            )
            return m.Refused("version", spoken)
        refusal = self._shared.greet(hello)
        if refusal is not None:
            logger.warning("a client is refused: %s", refusal)
            return m.Refused("layout", refusal[:MAX_REFUSAL_CHARS])
        self.hello = hello
        context = self._context
        self._may_store = m.LOCKS in hello.capabilities or not context.extents.needs_locks
        if not self._may_store:
            logger.warning(
                "client %s takes no lock of the arena, as earlier releases do not: it can load, and"
                " store nothing",
                hello.client,
            )
        arena = context.arena
        verify_hot = context.verify_hot
        if (
            verify_hot == VERIFY_AUTO
        ):  # where a GPU computes, a digest of every load would take longer than the rest of it
            verify_hot = "sampled" if m.ON_DEVICE in hello.capabilities else "always"
        return m.HelloOk(
            *(
                m.VERSION,
                context.server,
                str(arena.path),
                arena.size,
                arena.generation,
                verify_hot,
                context.salt,
            ),
            m.CAPABILITIES,
        )

    async def _lookup(self, request: m.Lookup) -> m.LookupOk:
        search_range = request.search_range or None
        timeout_s = min(self._context.timeout_s, request.deadline_ms / 1000)
        tiers = await self._context.stack.batched_tiers(
            self._names(request.keys), timeout_s, search_range
        )
        prefix = tuple(itertools.takewhile(lambda tier: tier is not None, tiers))
        return m.LookupOk(len(prefix), tuple(tier or "" for tier in prefix))

    def _prefetch(self, request: m.Prefetch) -> m.PrefetchOk:
        return m.PrefetchOk(
            self._context.tasks.start("prefetch", self._lift(self._names(request.keys)))
        )

    async def _lift(self, names: list[ChunkKey]) -> None:
        for result in await self._context.stack.batched_get(
            names, self._context.timeout_s, prefix_only=True
        ):
            if isinstance(result, Chunk):
                result.release()

    def _reserve(self, request: m.Reserve) -> m.ReserveOk:
        is_open = not self._is_draining and self._may_store
        reservations = (
            self._reservations.add(request.sizes) if is_open else (None,) * len(request.sizes)
        )
        self._context.counters.add(metrics.REFUSED_CHUNKS_TOTAL, reservations.count(None))
        return m.ReserveOk(reservations)

    async def _commit(self, request: m.Commit) -> m.CommitOk:
        stored = [False] * len(request.items)
        chunks: list[Chunk] = []
        places: list[int] = []
        for i, (handle, head) in enumerate(request.items):
            memory = self._reservations.take(handle)
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
            for chunk in chunks:
                chunk.release()
            self._context.extents.flush()
        return m.CommitOk(tuple(stored))

    def _described(self, memory: MemoryObj, head: bytes) -> Chunk | None:
        try:
            header, payload_bytes = decode_head(head)
        except RecordError as exc:
            logger.warning("a client committed a damaged record head: %s", exc.reason)
            return None
        if payload_bytes != memory.get_size():
            logger.warning(
                "a client committed %d bytes into a reservation of %d",
                payload_bytes,
                memory.get_size(),
            )
            return None
        return Chunk(
            ChunkKey(self._context.tenant, header.engine_key()), header, head, memory, HOT_TIER
        )

    def _abort(self, request: m.Abort) -> m.AbortOk:
        for handle in request.reservations:
            memory = self._reservations.take(handle)
            if memory is not None:
                memory.ref_count_down()
        return m.AbortOk()

    async def _pin(self, request: m.Pin) -> m.PinOk:
        self._pins.require_room(len(request.keys))
        names = self._names(request.keys)
        recompute_s = request.recompute_us / 1e6 if request.recompute_us else None
        timeout_s = request.deadline_ms / 1000
        got = await self._context.stack.batched_get(
            names, timeout_s, prefix_only=True, recompute_s=recompute_s
        )
        results = self._pins.fitting(fit_for_one_answer(got))
        counters = self._context.counters
        counters.add(metrics.REQUESTED_CHUNKS_TOTAL, len(names))
        pinned: list[m.PinnedChunk] = []
        for result in results:
            if isinstance(result, Miss):
                counters.add(metrics.MISSED_CHUNKS_TOTAL, len(names) - len(pinned), result.reason)
                return m.PinOk(tuple(pinned), result.reason)
            counters.add(metrics.LOADED_CHUNKS_TOTAL, 1, result.tier)
            counters.add(metrics.LOADED_BYTES_TOTAL, result.num_bytes, result.tier)
            pinned.append(self._pins.add(result))
        return m.PinOk(tuple(pinned), "")

    def _release(self, request: m.Release) -> m.ReleaseOk:
        self._pins.release(request.pins)
        return m.ReleaseOk()

    async def _reject(self, request: m.Reject) -> m.RejectOk:
        self._context.counters.add(
            metrics.CORRUPT_CHUNKS_TOTAL, await self._pins.reject(request.pins)
        )
        return m.RejectOk()

    async def _stage(self, request: m.Stage) -> m.StageOk:
        check_chains(request.chains)
        recompute_s = request.recompute_us / 1e6 if request.recompute_us else None
        staged = await self._staging.stage_cooperatively(
            request.ticket,
            request.chains,
            request.deadline_ms / 1000,
            request.is_prefix,
            recompute_s,
        )
        return m.StageOk(staged.is_ready, staged.tiers)

    def _describe(self, request: m.Describe) -> m.DescribeOk:
        check_names(request)
        self._context.descriptions.note(request, self)
        return m.DescribeOk()

    def _names(self, keys: tuple[bytes, ...]) -> list[ChunkKey]:
        return self._shared.names.names(keys)
