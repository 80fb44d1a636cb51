"""One client of the socket: its reservations, its pins, and the answers to its requests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import IdentityError, ProtocolError, RecordError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import MemoryObj, SharedArena
from lmcache_core.record import Chunk, Miss, MissReason, Result, decode_head
from lmcache_core.sidecar import messages as m
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters

from lmcache_sidecar import metrics

logger = logging.getLogger(__name__)

MAX_PINS = 16384
MAX_RESERVATIONS = 16384
MAX_PINNED_CHUNK_BYTES = 128
"""A chunk in an answer to Pin, beside its head; tier names are short."""
RESERVED_SHARE = 2
"""Reservations of one client may hold one part in this many of the arena."""
HOT_TIER = "Hot"


@dataclass(frozen=True)
class SessionContext:
    """What all sessions of a sidecar share.

    Attributes:
        stack: The tiers.
        arena: The shared arena.
        server: This sidecar's instance id.
        tenant: Namespace of this pod's chunks.
        verify_hot: What clients are to verify.
        salt: Handed to every client.
        timeout_s: Longest wait on the tiers for a lookup.
        tasks: Owner of background lifts.
        counters: What engines asked for and got, under the names of `lmcache_sidecar.metrics`.
    """

    stack: TierStack
    arena: SharedArena
    server: str
    tenant: str
    verify_hot: str
    salt: str
    timeout_s: float
    tasks: TaskSupervisor
    counters: Counters


class Session:
    """State of one connection; `close` gives everything back."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._ids: Iterator[int] = itertools.count(1)
        self._reserved: dict[int, MemoryObj] = {}
        self._pinned: dict[int, Chunk] = {}
        self._reserved_bytes = 0
        self._is_draining = False
        self.hello: m.Hello | None = None

    def describe(self) -> dict[str, int | str]:
        """For the status page."""
        hello = self.hello
        return {
            "client": hello.client if hello else "",
            "pid": hello.pid if hello else 0,
            "rank": hello.rank if hello else 0,
            "model": hello.model if hello else "",
            "num_reservations": len(self._reserved),
            "reserved_bytes": self._reserved_bytes,
            "num_pins": len(self._pinned),
        }

    def refuse_stores(self) -> None:
        """From now on every reservation is refused: the sidecar is draining."""
        self._is_draining = True

    def close(self) -> None:
        """Give back every reservation and pin: the client is gone."""
        for memory in self._reserved.values():
            memory.ref_count_down()
        for chunk in self._pinned.values():
            chunk.release()
        self._reserved.clear()
        self._pinned.clear()
        self._reserved_bytes = 0

    async def answer(self, request: m.Request) -> m.Answer:
        """Do what a request says.

        Raises:
            ProtocolError: It is out of turn or names something that is not this client's; the connection is to be closed.
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
            case m.Stats():
                return m.StatsOk(self._context.stack.stats())

    def _greet(self, hello: m.Hello) -> m.Answer:
        if not hello.version_min <= m.VERSION <= hello.version_max:
            spoken = f"this sidecar speaks version {m.VERSION}, the client {hello.version_min} to {hello.version_max}"
            return m.Refused("version", spoken)
        self.hello = hello
        context = self._context
        arena = context.arena
        return m.HelloOk(m.VERSION, context.server, str(arena.path), arena.size, arena.generation, context.verify_hot, context.salt)

    async def _lookup(self, request: m.Lookup) -> m.LookupOk:
        search_range = request.search_range or None
        timeout_s = min(self._context.timeout_s, request.deadline_ms / 1000)
        tiers = await self._context.stack.batched_tiers(self._names(request.keys), timeout_s, search_range)
        prefix = tuple(itertools.takewhile(lambda tier: tier is not None, tiers))
        return m.LookupOk(len(prefix), tuple(tier or "" for tier in prefix))

    def _prefetch(self, request: m.Prefetch) -> m.PrefetchOk:
        return m.PrefetchOk(self._context.tasks.start("prefetch", self._lift(self._names(request.keys))))

    async def _lift(self, names: list[ChunkKey]) -> None:
        for result in await self._context.stack.batched_get(names, self._context.timeout_s, prefix_only=True):
            if isinstance(result, Chunk):
                result.release()

    def _reserve(self, request: m.Reserve) -> m.ReserveOk:
        reservations = tuple(self._reserve_one(size) for size in request.sizes)
        self._context.counters.add(metrics.REFUSED_CHUNKS_TOTAL, reservations.count(None))
        return m.ReserveOk(reservations)

    def _reserve_one(self, size: int) -> tuple[int, int] | None:
        limit = self._context.arena.size // RESERVED_SHARE
        if self._is_draining or len(self._reserved) >= MAX_RESERVATIONS or self._reserved_bytes + size > limit:
            return None
        memory = self._context.stack.allocate(size)
        if memory is None:
            return None
        handle = next(self._ids)
        self._reserved[handle] = memory
        self._reserved_bytes += size
        return handle, memory.metadata.address

    async def _commit(self, request: m.Commit) -> m.CommitOk:
        stored = [False] * len(request.items)
        chunks: list[Chunk] = []
        places: list[int] = []
        for i, (handle, head) in enumerate(request.items):
            memory = self._take_reservation(handle)
            if memory is None:
                continue
            chunk = self._described(memory, head)
            if chunk is None:
                memory.ref_count_down()
                continue
            chunks.append(chunk)
            places.append(i)
        try:
            for i, chunk, is_kept in zip(places, chunks, await self._context.stack.batched_put(chunks), strict=True):
                stored[i] = is_kept
                self._context.counters.add(metrics.STORED_CHUNKS_TOTAL, is_kept)
                self._context.counters.add(metrics.STORED_BYTES_TOTAL, chunk.num_bytes * is_kept)
        finally:
            for chunk in chunks:
                chunk.release()
        return m.CommitOk(tuple(stored))

    def _described(self, memory: MemoryObj, head: bytes) -> Chunk | None:
        try:
            header, payload_bytes = decode_head(head)
        except RecordError as exc:
            logger.warning("a client committed a damaged record head: %s", exc.reason)
            return None
        if payload_bytes != memory.get_size():
            logger.warning("a client committed %d bytes into a reservation of %d", payload_bytes, memory.get_size())
            return None
        return Chunk(ChunkKey(self._context.tenant, header.engine_key()), header, head, memory, HOT_TIER)

    def _abort(self, request: m.Abort) -> m.AbortOk:
        for handle in request.reservations:
            memory = self._take_reservation(handle)
            if memory is not None:
                memory.ref_count_down()
        return m.AbortOk()

    def _take_reservation(self, handle: int) -> MemoryObj | None:
        memory = self._reserved.pop(handle, None)
        if memory is not None:
            self._reserved_bytes -= memory.get_size()
        return memory

    async def _pin(self, request: m.Pin) -> m.PinOk:
        if len(self._pinned) + len(request.keys) > MAX_PINS:
            raise ProtocolError(f"more than {MAX_PINS} pins; release some first")
        names = self._names(request.keys)
        recompute_s = request.recompute_us / 1e6 if request.recompute_us else None
        timeout_s = request.deadline_ms / 1000
        got = await self._context.stack.batched_get(names, timeout_s, prefix_only=True, recompute_s=recompute_s)
        results = _fit_for_one_answer(got)
        counters = self._context.counters
        counters.add(metrics.REQUESTED_CHUNKS_TOTAL, len(names))
        pinned: list[m.PinnedChunk] = []
        for result in results:
            if isinstance(result, Miss):
                counters.add(metrics.MISSED_CHUNKS_TOTAL, len(names) - len(pinned), result.reason)
                return m.PinOk(tuple(pinned), result.reason)
            counters.add(metrics.LOADED_CHUNKS_TOTAL, 1, result.tier)
            counters.add(metrics.LOADED_BYTES_TOTAL, result.num_bytes, result.tier)
            handle = next(self._ids)
            self._pinned[handle] = result
            memory = result.memory
            pinned.append(m.PinnedChunk(handle, memory.metadata.address, memory.get_size(), result.head, result.tier))
        return m.PinOk(tuple(pinned), "")

    def _release(self, request: m.Release) -> m.ReleaseOk:
        for handle in request.pins:
            chunk = self._pinned.pop(handle, None)
            if chunk is not None:
                chunk.release()
        return m.ReleaseOk()

    def _names(self, keys: tuple[bytes, ...]) -> list[ChunkKey]:
        try:
            return [ChunkKey(self._context.tenant, CacheEngineKey.from_canonical(key)) for key in keys]
        except IdentityError as exc:
            raise ProtocolError(str(exc)) from exc


def _fit_for_one_answer(results: list[Result]) -> list[Result]:
    """Heads of other writers may be large: chunks that one message cannot name are given back and count as misses."""
    room = m.MAX_MESSAGE_BYTES
    for i, result in enumerate(results):
        room -= len(result.head) + MAX_PINNED_CHUNK_BYTES if isinstance(result, Chunk) else 0
        if room < 0:
            for surplus in results[i:]:
                if isinstance(surplus, Chunk):
                    surplus.release()
            return [*results[:i], Miss(MissReason.NO_MEMORY)]
    return results
