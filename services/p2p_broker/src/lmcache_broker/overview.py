"""What the broker knows of the peers and their work, now and over the last hour."""

from __future__ import annotations

import heapq
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lmcache_core.p2p import PeerFigures
from lmcache_core.security import Principal, unix_ms

from lmcache_broker.bodies import (
    HotChunkView,
    LinkView,
    OverviewView,
    PeerView,
    SampleView,
    SeenFiguresView,
    SeenPeerView,
    TierBody,
    WorkView,
)
from lmcache_broker.peers.directory import SHARED_OWNER
from lmcache_broker.peers.record import PeerRecord
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.transfers.hot import HotChunks

MAX_SAMPLES: Final = 360
MAX_SAMPLED_OWNERS: Final = 256
"""Tenants whose work is remembered; of further ones only the present is known."""
MAX_LABELS: Final = 64
"""Names of one kind that are counted by themselves; peers may tell any."""
OTHER_LABEL: Final = "other"
"""Further ones, together."""


@dataclass(slots=True)
class WorkCounts:
    """What engines asked for and got.

    Attributes:
        requested_chunks: Chunks wanted.
        loaded_chunks: Chunks got, by tier.
        loaded_bytes: Bytes of these.
        missed_chunks: Chunks not got, by reason.
        stored_bytes: Bytes stored.
    """

    requested_chunks: int = 0
    loaded_chunks: Counter[str] = field(default_factory=Counter)
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    missed_chunks: Counter[str] = field(default_factory=Counter)
    stored_bytes: int = 0

    def add(self, figures: PeerFigures, before: PeerFigures | None = None) -> None:
        """Count what `figures` have above those `before`."""
        known = PeerFigures() if before is None else before
        self.requested_chunks += max(0, figures.requested_chunks - known.requested_chunks)
        self.stored_bytes += max(0, figures.stored_bytes - known.stored_bytes)
        _grow(self.loaded_chunks, figures.loaded_chunks, known.loaded_chunks)
        _grow(self.loaded_bytes, figures.loaded_bytes, known.loaded_bytes)
        _grow(self.missed_chunks, figures.missed_chunks, known.missed_chunks)

    def merge(self, other: WorkCounts) -> None:
        """Count what another one has counted."""
        self.requested_chunks += other.requested_chunks
        self.stored_bytes += other.stored_bytes
        _grow(self.loaded_chunks, other.loaded_chunks, {})
        _grow(self.loaded_bytes, other.loaded_bytes, {})
        _grow(self.missed_chunks, other.missed_chunks, {})


@dataclass(frozen=True, slots=True)
class Sample:
    """One interval: Unix time in milliseconds at its end, and what was done in it."""

    ended_ms: int
    work: WorkCounts


class History:
    """The last `MAX_SAMPLES` intervals, by owner.

    What a peer counted before this broker first heard of it belongs to no interval; a new life of a
    peer that was known counts from 0.

    Args:
        wall_ms: Unix time in milliseconds.
    """

    def __init__(self, wall_ms: Callable[[], int] = unix_ms) -> None:
        self._wall_ms = wall_ms
        self._samples: deque[tuple[int, Mapping[str, WorkCounts]]] = deque(maxlen=MAX_SAMPLES)
        self._last: dict[str, tuple[int, PeerFigures]] = {}

    def sample(self, records: Iterable[PeerRecord]) -> None:
        """An interval is over.

        Args:
            records: All live peers.
        """
        by_owner: dict[str, WorkCounts] = {}
        seen: dict[str, tuple[int, PeerFigures]] = {}
        for record in records:
            figures, known = record.figures, self._last.get(record.field)
            if figures is None:
                continue
            seen[record.field] = (record.peer.incarnation, figures)
            if known is None or (
                record.owner not in by_owner and len(by_owner) >= MAX_SAMPLED_OWNERS
            ):
                continue
            incarnation, before = known
            is_same_life = incarnation == record.peer.incarnation
            by_owner.setdefault(record.owner, WorkCounts()).add(
                figures, before if is_same_life else None
            )
        self._last = seen
        self._samples.append((self._wall_ms(), by_owner))

    def of(self, owners: Collection[str], max_samples: int = MAX_SAMPLES) -> list[Sample]:
        """The latest intervals, the oldest first, of these owners together."""
        found = []
        for ended_ms, by_owner in list(self._samples)[
            len(self._samples) - min(max_samples, len(self._samples)) :
        ]:
            work = WorkCounts()
            for owner in owners:
                if owner in by_owner:
                    work.merge(by_owner[owner])
            found.append(Sample(ended_ms, work))
        return found


def _grow(counts: Counter[str], now: Mapping[str, int], before: Mapping[str, int]) -> None:
    for name, count in now.items():
        growth = count - before.get(name, 0)
        if growth <= 0:
            continue
        if name not in counts:  # interned: each heartbeat brings the same few names
            name = sys.intern(name) if len(counts) < MAX_LABELS else OTHER_LABEL
        counts[name] += growth


MAX_SHOWN_PEERS: Final = 256
MAX_SHOWN_LINKS: Final = 512
MAX_SHOWN_CHUNKS: Final = 10
MAX_KEPT_VIEWS: Final = 16
MIN_KEPT_COST_S: Final = 0.002
REST_PER_COST: Final = 20
"""A view that took longer than the above is shown to others of its tenant for so many times as
long, at most for `MAX_REST_S`: however many look, the broker spends a twentieth of its time on
them, and a small cluster is always shown as it is.
"""
MAX_REST_S: Final = 2.0


class BrokerOverview:
    """Builds `OverviewView`. Values were checked when they came and are not checked again.

    Args:
        broker: This broker's name among its peers.
        registry: The peers.
        hot: What they pull most.
        interval_s: Between two samples.

    Attributes:
        interval_s: See above.
    """

    def __init__(
        self, broker: str, registry: PeerRegistry, hot: HotChunks, interval_s: float
    ) -> None:
        self.interval_s = interval_s
        self._broker = broker
        self._registry = registry
        self._hot = hot
        self._history = History()
        self._kept: OrderedDict[tuple[str, int], tuple[float, OverviewView]] = OrderedDict()

    async def sample(self) -> None:
        """An interval is over; to be repeated."""
        await self._registry.refresh()
        self._history.sample(self._registry.directory.records())

    async def of(self, principal: Principal, max_samples: int) -> OverviewView:
        """What `principal` may see."""
        await self._registry.refresh()
        key = (principal.tenant, max_samples)
        until_s, kept = self._kept.get(key, (0.0, None))
        if kept is not None and time.monotonic() < until_s:
            return kept
        began_s = time.thread_time()
        view = self._build(principal, max_samples)
        cost_s = time.thread_time() - began_s
        self._kept.pop(key, None)
        if cost_s >= MIN_KEPT_COST_S:
            self._kept[key] = (time.monotonic() + min(MAX_REST_S, REST_PER_COST * cost_s), view)
            if len(self._kept) > MAX_KEPT_VIEWS:
                self._kept.popitem(last=False)
        return view

    def _build(self, principal: Principal, max_samples: int) -> OverviewView:
        records = sorted(
            self._registry.directory.records(principal),
            key=lambda record: (not record.draining, record.peer.id),
        )
        totals = WorkCounts()
        for record in records:
            if record.figures is not None:
                totals.add(record.figures)
        now_s = time.monotonic()
        samples = self._history.of((principal.tenant, SHARED_OWNER), max_samples)
        hottest = self._hot.hottest(principal.tenant, MAX_SHOWN_CHUNKS, now_s)
        return OverviewView.model_construct(
            time_ms=unix_ms(),
            broker=self._broker,
            shares=self._registry.shares,
            is_shared=self._registry.is_shared,
            num_peers=len(records),
            peers=[_seen(record, now_s) for record in records[:MAX_SHOWN_PEERS]],
            links=_links(records),
            totals=_work(totals),
            interval_s=self.interval_s,
            samples=[
                SampleView.model_construct(ended_ms=sample.ended_ms, work=_work(sample.work))
                for sample in samples
            ],
            hot_chunks=[
                HotChunkView(chunk_id=chunk_id, num_pulls=num_pulls)
                for chunk_id, num_pulls in hottest
            ],
        )


def _work(work: WorkCounts) -> WorkView:
    return WorkView.model_construct(
        requested_chunks=work.requested_chunks,
        loaded_chunks=work.loaded_chunks,
        loaded_bytes=work.loaded_bytes,
        missed_chunks=work.missed_chunks,
        stored_bytes=work.stored_bytes,
    )


def _seen(record: PeerRecord, now_s: float) -> SeenPeerView:
    peer = PeerView.model_validate(record.status(now_s))
    told = record.figures
    figures = None
    if told is not None:
        figures = SeenFiguresView.model_construct(
            requested_chunks=told.requested_chunks,
            loaded_chunks=told.loaded_chunks,
            loaded_bytes=told.loaded_bytes,
            missed_chunks=told.missed_chunks,
            stored_chunks=told.stored_chunks,
            stored_bytes=told.stored_bytes,
            tiers=[TierBody.model_validate(tier) for tier in told.tiers],
            sole_bytes=told.sole_bytes,
        )
    return SeenPeerView.model_construct(**dict(peer), figures=figures)


def _links(records: Iterable[PeerRecord]) -> list[LinkView]:
    found = (
        (-num_bytes, record.peer.id, server)
        for record in records
        if record.figures is not None
        for server, num_bytes in record.figures.pulled_bytes.items()
        if num_bytes
    )
    strongest = heapq.nsmallest(MAX_SHOWN_LINKS, found)
    return [
        LinkView.model_construct(requester=requester, server=server, num_bytes=-less)
        for less, requester, server in strongest
    ]
