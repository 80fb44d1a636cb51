"""One read from peers: from the holder that the broker assigns, from a second one if that is late,
and from the next one if it fails.

    holders ──broker──> assignments ──> race (one peer, some chunks) ──late──> broker again, without
    those already asked
                                             └──failed or stalled──────────> the same

A chunk has arrived when its whole record has been verified; a second copy is released. A peer that
is overtaken for all of its chunks is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.p2p.broker_client import BrokerClient
from lmcache_core.p2p.messages import MAX_COUNTED_PEERS, Assignment, HeldBy
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.telemetry.sparse_log import SparseLog

logger = logging.getLogger(__name__)

BATCH_CHUNKS: Final = 8
"""Chunks in one GET: if the peer is late, only the chunks of unfinished GETs are requested
twice.
"""
MAX_BATCHES_UNDERWAY: Final = 4
MAX_QUEUE_S: Final = 0.2
"""Longest wait for a holder while all are busy: the remote tier, which is asked afterwards, may
have the chunks, too.
"""
MAX_HOLDERS_ASKED: Final = 4
"""Bound on the holders asked for one chunk, in turn or concurrently."""
RENEWALS_PER_TICKET: Final = 3
"""Leaves time for another attempt if a renewal fails."""
MIN_RENEWAL_S: Final = 0.05
STALL_SHARE: Final = 0.5
"""Part of a read's time after which a silent peer is abandoned, so that the next holder or the next
tier still has time.
"""


HEDGE_WINDOW: Final = 64
"""Pulls remembered per size class."""
MIN_SAMPLES: Final = 16
MAX_SIZE_CLASS: Final = 12
HEDGE_QUANTILE: Final = 0.95
MIN_HEDGE_S: Final = 0.005
"""Below this, a second request costs more than the wait that it saves."""
UNKNOWN_SHARE: Final = 0.25
"""Part of the remaining time after which a pull is late, while too few pulls are known."""
MAX_HEDGES_SAVED: Final = 5.0
HEDGES_PER_PULL: Final = 0.1
"""Additional pulls per pull. A slow network makes all pulls late; asking every peer twice would
make it slower.
"""


class Hedging:
    """Decides when a pull is late, based on the duration of pulls in its size class (number of
    chunks, by powers of two), and whether it may be doubled: one in ten over time, with small
    bursts.
    """

    def __init__(self) -> None:
        self._saved = MAX_HEDGES_SAVED
        self._classes: list[deque[float]] = [
            deque(maxlen=HEDGE_WINDOW) for _ in range(MAX_SIZE_CLASS + 1)
        ]

    def observe(self, num_chunks: int, elapsed_s: float) -> None:
        """Record how long a pull of `num_chunks` took until it ended or was abandoned because
        another peer was faster.
        """
        self._class_of(num_chunks).append(elapsed_s)

    def hedge_s(self, num_chunks: int, left_s: float) -> float:
        """Return the number of seconds after which a pull is late.

        Args:
            num_chunks: Number of chunks requested.
            left_s: Time until its deadline.
        """
        samples = sorted(self._class_of(num_chunks))
        if len(samples) < MIN_SAMPLES:
            return max(MIN_HEDGE_S, left_s * UNKNOWN_SHARE)
        return max(MIN_HEDGE_S, samples[min(len(samples) - 1, int(len(samples) * HEDGE_QUANTILE))])

    def earn(self) -> None:
        """Record that a pull begins."""
        self._saved = min(MAX_HEDGES_SAVED, self._saved + HEDGES_PER_PULL)

    def spend(self) -> bool:
        """Return whether this pull may be doubled, and count it if so."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def _class_of(self, num_chunks: int) -> deque[float]:
        return self._classes[min(MAX_SIZE_CLASS, num_chunks.bit_length())]


@dataclass(slots=True)
class PullFigures:
    """Results of pulls.

    Attributes:
        pulls: Peers that were asked.
        failed_pulls: Pulls that did not deliver everything requested.
        renewed_pulls: Tickets that were replaced because they expired before their pulls ended.
        hedged_pulls: Pulls that were late, so that another peer was asked, too.
        won_hedges: Chunks that the other peer delivered first.
        failed_over_chunks: Chunks that were requested again because a peer failed.
        pulled_chunks: Chunks received.
        pulled_bytes: Their bytes.
        wasted_bytes: Bytes of chunks that arrived a second time.
        corrupt_chunks: Chunks that arrived damaged, or were not the ones requested.
    """

    pulls: int = 0
    failed_pulls: int = 0
    renewed_pulls: int = 0
    hedged_pulls: int = 0
    won_hedges: int = 0
    failed_over_chunks: int = 0
    pulled_chunks: int = 0
    pulled_bytes: int = 0
    wasted_bytes: int = 0
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
        instance: This instance.
        broker: Assigns holders.
        peers: Connections.
        hedging: Decides when another peer is asked as well.
        figures: Results of all pulls.
        pulled: Bytes received, by peer.
        log: Reports peers that fail.
    """

    instance: str
    broker: BrokerClient
    peers: PeerPool
    hedging: Hedging = field(default_factory=Hedging)
    figures: PullFigures = field(default_factory=PullFigures)
    pulled: PulledBytes = field(default_factory=PulledBytes)
    log: SparseLog = field(default_factory=lambda: SparseLog(logger))


@dataclass(slots=True, eq=False)
class _Race:
    """One peer at work on some chunks.

    Attributes:
        assignment: The peer and its chunks.
        ticket: The current ticket.
        open: Indices of its chunks that have not arrived yet.
        num_chunks: Number of chunks requested from it.
        began: On the loop's clock.
        moved: Time at which something last arrived from it.
        is_hedge: Another peer was asked for the same chunks before.
        work: The task that pulls.
    """

    assignment: Assignment
    ticket: str
    open: set[int]
    num_chunks: int
    began: float
    moved: float
    is_hedge: bool
    work: asyncio.Task[None] | None = None


class PeerPull:
    """Reads chunks from peers, once. For use on the event loop.

    Args:
        parts: State shared with other reads.
        keys: Names of the chunks.
        holders: Possible holders of the first chunks, one entry per chunk; chunks without any are
        not requested.
        allocate: Allocates memory for payloads.
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
        self._in_question: set[int] = set()
        self._allocate = allocate
        self._deadline = deadline
        self._stall_s = max(0.0, deadline - asyncio.get_running_loop().time()) * STALL_SHARE
        self._places = {key.key.chunk_id().hex(): i for i, key in enumerate(keys[: len(holders)])}
        self._results: list[Result] = [_NEVER_STORED] * len(keys)
        self._races: list[_Race] = []
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
                self._begin(assignments, is_hedge=False)
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
        asked = {
            i
            for i in places
            if self._untried[i]
            and self._num_asked[i] < MAX_HOLDERS_ASKED
            and not isinstance(self._results[i], Chunk)
        } - self._in_question
        if not asked:
            return ()
        wanted = [(self._keys[i].key.chunk_id(), self._untried[i]) for i in sorted(asked)]
        self._in_question |= asked
        try:
            wait_ms = int(min(wait_s, MAX_QUEUE_S) * 1000)
            found = await self._parts.broker.transfers(
                self._parts.instance, wanted, wait_ms=wait_ms
            )
            self.granted += [assignment.pull for assignment in found]
            return found
        finally:
            self._in_question -= asked

    def _begin(self, assignments: Sequence[Assignment], is_hedge: bool) -> None:
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
            self._parts.hedging.earn()
            still_open = {i for i in places if not isinstance(self._results[i], Chunk)}
            race = _Race(assignment, assignment.ticket, still_open, len(places), now, now, is_hedge)
            self._races.append(race)
            self._group.create_task(self._watch(race))

    async def _watch(self, race: _Race) -> None:
        """Let a peer work; ask another one as well if it is late, or instead if it fails."""
        work = race.work = self._group.create_task(self._work(race))
        renewing = self._group.create_task(self._renew(race))
        hedge_at = race.began + self._parts.hedging.hedge_s(
            race.num_chunks, self._deadline - race.began
        )
        while not work.done():
            now = self._now()
            if now >= hedge_at:
                hedge_at = float("inf")
                if race.open and self._parts.hedging.spend():
                    self._group.create_task(self._ask_again(sorted(race.open), is_hedge=True))
            if now >= race.moved + self._stall_s:
                work.cancel()
                await asyncio.wait([work])
                await self._parts.peers.suspect(race.assignment.distributed_url)
                break
            await asyncio.wait(
                [work], timeout=max(0.0, min(hedge_at, race.moved + self._stall_s) - now)
            )
        renewing.cancel()
        self._races.remove(race)
        await self._judge(race)

    async def _renew(self, race: _Race) -> None:
        """Renew the ticket of a pull that outlasts it, until cancelled."""
        pull, ttl_ms = race.assignment.pull, race.assignment.ttl_ms
        while pull and ttl_ms:
            await asyncio.sleep(max(MIN_RENEWAL_S, ttl_ms / 1000 / RENEWALS_PER_TICKET))
            try:
                renewal = await self._parts.broker.renew(self._parts.instance, pull)
            except UnavailableError:
                continue
            if renewal is None:
                return  # the ticket stays valid for a while; then this peer fails
            race.ticket, ttl_ms = renewal.ticket, renewal.ttl_ms
            self._parts.figures.renewed_pulls += 1

    async def _judge(self, race: _Race) -> None:
        """Learn from a finished race, and handle what it has not delivered."""
        now, parts = self._now(), self._parts
        if not race.open:
            late_s = parts.hedging.hedge_s(race.num_chunks, self._deadline - race.began)
            parts.hedging.observe(race.num_chunks, now - race.began)
            if race.moved == race.began and now - race.began >= late_s:
                await parts.peers.suspect(
                    race.assignment.distributed_url
                )  # others were faster, and it has sent nothing at all
            return
        parts.figures.failed_pulls += 1
        left_alone = sorted(race.open.difference(*(other.open for other in self._races)))
        if left_alone and now < self._deadline:
            parts.figures.failed_over_chunks += len(left_alone)
            await self._ask_again(left_alone, is_hedge=False)

    async def _ask_again(self, places: Sequence[int], is_hedge: bool) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                assignments = await self._assigned(places)
        except (UnavailableError, TimeoutError):
            return
        self._parts.figures.hedged_pulls += bool(assignments) and is_hedge
        self._begin(assignments, is_hedge)

    async def _work(self, race: _Race) -> None:
        """Pull the chunks of a race, a few batches at a time. A hedge starts from the end: the two
        meet, and little is sent twice.
        """
        places = sorted(race.open, reverse=race.is_hedge)
        batches = iter([places[i : i + BATCH_CHUNKS] for i in range(0, len(places), BATCH_CHUNKS)])
        async with asyncio.TaskGroup() as lanes:
            for _ in range(MAX_BATCHES_UNDERWAY):
                lanes.create_task(self._lane(race, batches))

    async def _lane(self, race: _Race, batches: Iterator[list[int]]) -> None:
        for batch in batches:
            wanted = [i for i in batch if i in race.open]
            if not wanted:
                continue
            got = await self._get(race, wanted)
            for i, result in zip(wanted, got, strict=True):
                self._take(race, i, result)
            if all(isinstance(result, Miss) and result.reason in _PEER_IS_GONE for result in got):
                return

    async def _get(self, race: _Race, places: Sequence[int]) -> Sequence[Result]:
        def allocate(num_bytes: int) -> MemoryObj | None:
            race.moved = self._now()  # a record has begun to arrive
            return self._allocate(num_bytes)

        try:
            client = await self._parts.peers.client(race.assignment.distributed_url)
            left_s = self._deadline - self._now()
            return await client.get(
                [self._keys[i] for i in places], allocate, ticket=race.ticket, timeout_s=left_s
            )
        except (UnavailableError, AuthenticationError, ProtocolError) as exc:
            self._parts.log.log(
                logging.WARNING, "pull failed: peer=%s error=%s", race.assignment.instance, exc
            )
            return [Miss(MissReason.UNAVAILABLE)] * len(places)

    def _take(self, race: _Race, place: int, result: Result) -> None:
        figures = self._parts.figures
        if isinstance(result, Miss):
            figures.corrupt_chunks += result.reason in _DAMAGED
            known = self._results[place]
            if isinstance(known, Miss) and known.reason in _SAYS_LITTLE:
                self._results[place] = result
            return
        race.moved = self._now()
        if isinstance(self._results[place], Chunk):
            figures.wasted_bytes += result.num_bytes
            result.release()
            return
        self._results[place] = result
        figures.pulled_chunks += 1
        figures.pulled_bytes += result.num_bytes
        self._parts.pulled.add(race.assignment.instance, result.num_bytes)
        figures.won_hedges += race.is_hedge
        for other in self._races:
            if place in other.open:
                other.open.discard(place)
                if not other.open and other.work is not None and len(self._races) > 1:
                    other.work.cancel()

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
