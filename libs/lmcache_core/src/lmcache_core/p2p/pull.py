"""One read from peers: from the holder that the broker assigns, or from the next one if that fails.

    holders ──broker──> assignments ──> share (one peer, some chunks) ──failed or stalled──┐
                           ▲                                                               │
                           └────────── broker again, without those already asked ──────────┘

A chunk is in one share at a time. It has arrived when its whole record has been verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.p2p.broker_client import BrokerClient
from lmcache_core.p2p.by_mover import MoverPulls
from lmcache_core.p2p.messages import MAX_COUNTED_PEERS, Assignment, HeldBy
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.telemetry.sparse_log import SparseLog

logger = logging.getLogger(__name__)

BATCH_CHUNKS: Final = 8
"""Chunks in one GET: if the peer fails, only the chunks of unfinished GETs are requested again."""
MAX_BATCHES_UNDERWAY: Final = 4
MAX_QUEUE_S: Final = 0.2
"""Longest wait for a holder while all are busy: the remote tier, which is asked afterwards, may
have the chunks, too.
"""
MAX_HOLDERS_ASKED: Final = 4
"""Bound on the holders asked for one chunk, in turn."""
RENEWALS_PER_TICKET: Final = 3
"""Leaves time for another attempt if a renewal fails."""
MIN_RENEWAL_S: Final = 0.05
STALL_SHARE: Final = 0.5
"""Part of a read's time after which a silent peer is abandoned, so that the next holder or the next
tier still has time.
"""


@dataclass(slots=True)
class PullFigures:
    """Results of pulls.

    Attributes:
        pulls: Peers that were asked.
        failed_pulls: Pulls that did not deliver everything requested.
        renewed_pulls: Tickets that were replaced because they expired before their pulls ended.
        failed_over_chunks: Chunks that were requested again because a peer failed.
        corrupt_chunks: Chunks that arrived damaged, or were not the ones requested.
    """

    pulls: int = 0
    failed_pulls: int = 0
    renewed_pulls: int = 0
    failed_over_chunks: int = 0
    pulled_chunks: int = 0
    pulled_bytes: int = 0
    corrupt_chunks: int = 0


class PulledBytes(OrderedDict[str, int]):
    """Bytes received, by peer; keeps the peers that sent something most recently."""

    def add(self, peer_id: str, num_bytes: int) -> None:
        """Count bytes sent by a peer."""
        self[peer_id] = self.pop(peer_id, 0) + num_bytes
        if len(self) > MAX_COUNTED_PEERS:
            self.popitem(last=False)


@dataclass(frozen=True, slots=True)
class PullParts:
    """State shared by all pulls of one instance.

    Attributes:
        mover: Another way to peers than lm://; None: there is none.
    """

    instance: str
    broker: BrokerClient
    peers: PeerPool
    mover: MoverPulls | None = None
    figures: PullFigures = field(default_factory=PullFigures)
    pulled: PulledBytes = field(default_factory=PulledBytes)
    log: SparseLog = field(default_factory=lambda: SparseLog(logger))


@dataclass(slots=True, eq=False)
class _Share:
    """The chunks of one peer, and its work on them.

    Attributes:
        ticket: The current ticket.
        open: Indices of its chunks that have not arrived yet.
        moved: Time at which something last arrived from it, on the loop's clock; stays as it is
            once the peer has been abandoned.
        work: The task that pulls, once it has begun.
    """

    assignment: Assignment
    ticket: str
    open: set[int]
    moved: float
    work: asyncio.Task[None] | None = None

    def note_arrival(self) -> None:
        """Something has arrived from the peer."""
        if self.work is not None and not self.work.cancelling():
            self.moved = asyncio.get_running_loop().time()


class PeerPull:
    """Reads chunks from peers, once. For use on the event loop.

    Args:
        holders: Possible holders of the first chunks, one entry per chunk; chunks without any are
            not requested.
        deadline: On the loop's clock.

    Attributes:
        granted: Ids of the pulls that the broker has granted; report them as done when they have
            ended.
    """

    def __init__(
        self,
        parts: PullParts,
        keys: Sequence[ChunkKey],
        holders: Sequence[Sequence[HeldBy]],
        allocate: Allocate,
        deadline: float,
    ) -> None:
        self._parts = parts
        self._keys = keys
        self.granted: list[str] = []
        self._untried = [list(names) for names in holders]
        self._num_asked = [0] * len(holders)
        self._allocate = allocate
        self._deadline = deadline
        self._stall_s = max(0.0, deadline - asyncio.get_running_loop().time()) * STALL_SHARE
        self._places = {key.key.chunk_id().hex(): i for i, key in enumerate(keys[: len(holders)])}
        self._results: list[Result] = [_NEVER_STORED] * len(keys)
        self._group = asyncio.TaskGroup()

    async def assign(self) -> Sequence[Assignment]:
        """Ask the broker for the first time.

        Raises:
            UnavailableError: The broker is unavailable.
        """
        return await self._assigned(range(len(self._untried)), wait_s=self._stall_s)

    async def run(self, assignments: Sequence[Assignment]) -> list[Result]:
        """Pull until the deadline, which is enforced here: callers need no timeout.

        Args:
            assignments: Result of `assign`.

        Returns:
            One result per key, in order; the caller owns the chunks. A chunk that no peer has
                delivered is a miss.
        """
        try:
            async with self._group:
                self._begin(assignments)
        except BaseException:
            for result in self._results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        return self._results

    async def _assigned(self, places: Sequence[int], wait_s: float = 0.0) -> Sequence[Assignment]:
        """Return the broker's assignments for these chunks among the holders not asked yet; if all
        are busy, wait for one.
        """
        wanted = [
            (self._keys[i].key.chunk_id(), self._untried[i])
            for i in places
            if self._untried[i] and self._num_asked[i] < MAX_HOLDERS_ASKED
        ]
        if not wanted:
            return ()
        wait_ms = int(min(wait_s, MAX_QUEUE_S) * 1000)
        found = await self._parts.broker.transfers(self._parts.instance, wanted, wait_ms=wait_ms)
        self.granted += [assignment.pull for assignment in found]
        return found

    def _begin(self, assignments: Sequence[Assignment]) -> None:
        now = self._now()
        for assignment in assignments:
            places = {self._places[chunk_id] for chunk_id in assignment.chunk_ids}
            for i in places:
                self._untried[i] = [
                    holder for holder in self._untried[i] if holder.instance != assignment.instance
                ]
                self._num_asked[i] += 1
                if self._results[i] == _NEVER_STORED:
                    self._results[i] = Miss(MissReason.UNAVAILABLE)  # until there is an answer
            self._parts.figures.pulls += 1
            share = _Share(assignment, assignment.ticket, places, now)
            self._group.create_task(self._watch(share))

    async def _watch(self, share: _Share) -> None:
        """Let a peer work until it is done or stalls; then request what it has not delivered from
        the next ones.
        """
        work = share.work = self._group.create_task(self._work(share))
        renewing = self._group.create_task(self._renew(share))
        while not work.done():
            left_s = share.moved + self._stall_s - self._now()
            if left_s <= 0:
                work.cancel()
                await asyncio.wait([work])
                await self._parts.peers.suspect(share.assignment.distributed_url)
                break
            await asyncio.wait([work], timeout=left_s)
        renewing.cancel()
        await self._judge(share)

    async def _renew(self, share: _Share) -> None:
        """Renew the ticket of a pull that outlasts it, until cancelled."""
        pull, ttl_ms = share.assignment.pull, share.assignment.ttl_ms
        while pull and ttl_ms:
            await asyncio.sleep(max(MIN_RENEWAL_S, ttl_ms / 1000 / RENEWALS_PER_TICKET))
            try:
                renewal = await self._parts.broker.renew(self._parts.instance, pull)
            except UnavailableError:
                continue
            if renewal is None:
                return  # the ticket stays valid for a while; then this peer fails
            share.ticket, ttl_ms = renewal.ticket, renewal.ttl_ms
            self._parts.figures.renewed_pulls += 1

    async def _judge(self, share: _Share) -> None:
        """Request what a peer has not delivered from the next ones, if time is left."""
        if not share.open:
            return
        figures = self._parts.figures
        figures.failed_pulls += 1
        if self._now() >= self._deadline:
            return
        figures.failed_over_chunks += len(share.open)
        try:
            async with asyncio.timeout_at(self._deadline):
                assignments = await self._assigned(sorted(share.open))
        except (UnavailableError, TimeoutError):
            return
        self._begin(assignments)

    async def _work(self, share: _Share) -> None:
        places = sorted(share.open)
        batches = iter([places[i : i + BATCH_CHUNKS] for i in range(0, len(places), BATCH_CHUNKS)])
        async with asyncio.TaskGroup() as lanes:
            for _ in range(MAX_BATCHES_UNDERWAY):
                lanes.create_task(self._lane(share, batches))

    async def _lane(self, share: _Share, batches: Iterator[list[int]]) -> None:
        for batch in batches:
            got = await self._get(share, batch)
            for i, result in zip(batch, got, strict=True):
                self._take(share, i, result)
            if all(isinstance(result, Miss) and result.reason in _PEER_IS_GONE for result in got):
                return

    async def _get(self, share: _Share, places: Sequence[int]) -> Sequence[Result]:
        def allocate(num_bytes: int) -> MemoryObj | None:
            share.note_arrival()  # a record has begun
            return self._allocate(num_bytes)

        keys, peer = [self._keys[i] for i in places], share.assignment.instance
        mover, found = self._parts.mover, cast("list[Result | None]", [None] * len(places))
        try:
            client = await self._parts.peers.client(share.assignment.distributed_url)
            if mover is not None and client.lends and mover.is_faster(peer):
                found = await mover.get(peer, client, keys, allocate, share.ticket, self._deadline)
            rest, began = [i for i, result in enumerate(found) if result is None], self._now()
            if rest:
                got = await client.get(
                    [keys[i] for i in rest],
                    allocate,
                    ticket=share.ticket,
                    timeout_s=self._deadline - began,
                )
                for i, result in zip(rest, got, strict=True):
                    found[i] = result
                if mover is not None:
                    num_bytes = sum(each.num_bytes for each in got if isinstance(each, Chunk))
                    mover.note(peer, False, num_bytes, self._now() - began)
        except (UnavailableError, AuthenticationError, ProtocolError) as exc:
            self._parts.log.log(
                logging.WARNING, "pull failed: peer=%s error=%s", share.assignment.instance, exc
            )
        except BaseException:
            release_all(found)
            raise
        return [Miss(MissReason.UNAVAILABLE) if result is None else result for result in found]

    def _take(self, share: _Share, place: int, result: Result) -> None:
        figures = self._parts.figures
        if isinstance(result, Miss):
            figures.corrupt_chunks += result.reason in _DAMAGED
            known = self._results[place]
            if isinstance(known, Miss) and known.reason in _SAYS_LITTLE:
                self._results[place] = result
            return
        share.note_arrival()
        self._results[place] = result
        figures.pulled_chunks += 1
        figures.pulled_bytes += result.num_bytes
        self._parts.pulled.add(share.assignment.instance, result.num_bytes)
        share.open.discard(place)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


_NEVER_STORED: Final = Miss(MissReason.NEVER_STORED)
_PEER_IS_GONE: Final = frozenset({MissReason.UNAVAILABLE, MissReason.DEADLINE})
_DAMAGED: Final = frozenset({MissReason.CORRUPT, MissReason.IDENTITY})
_SAYS_LITTLE: Final = _PEER_IS_GONE | {MissReason.NEVER_STORED}
"""Reasons that any other one overrides: that the second holder is unavailable says less than why
the first one did not serve.
"""
