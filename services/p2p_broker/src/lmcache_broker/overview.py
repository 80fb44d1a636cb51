"""What the broker knows of the peers and their work, now and over the last hour."""

from __future__ import annotations

import heapq
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec
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


class History:
    """The last `MAX_SAMPLES` intervals, by owner.

    What a peer counted before this broker first heard of it belongs to no interval; a new life of a
    peer that was known counts from 0.

    Args:
        wall_ms: Unix time in milliseconds.
    """

    def __init__(self, wall_ms: Callable[[], int] = unix_ms) -> None:
        self._wall_ms = wall_ms
        self._samples: deque[tuple[int, Mapping[str, WorkView]]] = deque(maxlen=MAX_SAMPLES)
        self._last: dict[str, tuple[int, PeerFigures]] = {}

    def sample(self, records: Iterable[PeerRecord]) -> None:
        """End an interval.

        Args:
            records: All live peers.
        """
        by_owner: dict[str, WorkView] = {}
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
            grow(
                by_owner.setdefault(record.owner, no_work()),
                figures,
                before if is_same_life else PeerFigures(),
            )
        self._last = seen
        self._samples.append((self._wall_ms(), by_owner))

    def of(self, owners: Collection[str], max_samples: int = MAX_SAMPLES) -> list[SampleView]:
        """Return the latest intervals, the oldest first, of these owners together."""
        found = []
        for ended_ms, by_owner in list(self._samples)[
            len(self._samples) - min(max_samples, len(self._samples)) :
        ]:
            work = no_work()
            for owner in owners:
                if owner in by_owner:
                    grow(work, by_owner[owner])
            found.append(SampleView.model_construct(ended_ms=ended_ms, work=work))
        return found


def no_work() -> WorkView:
    """Return the work of a peer that has not begun."""
    return WorkView(
        requested_chunks=0, loaded_chunks={}, loaded_bytes={}, missed_chunks={}, stored_bytes=0
    )


def grow(
    work: WorkView,
    now: WorkView | PeerFigures,
    before: PeerFigures = PeerFigures(),  # noqa: B008
) -> None:
    """Add to `work` what was counted since `before`; counts only grow."""
    work.requested_chunks += max(0, now.requested_chunks - before.requested_chunks)
    work.stored_bytes += max(0, now.stored_bytes - before.stored_bytes)
    for counts, new, old in (
        (work.loaded_chunks, now.loaded_chunks, before.loaded_chunks),
        (work.loaded_bytes, now.loaded_bytes, before.loaded_bytes),
        (work.missed_chunks, now.missed_chunks, before.missed_chunks),
    ):
        for name, count in new.items():
            growth = count - old.get(name, 0)
            if growth <= 0:
                continue
            if name not in counts:  # interned: each heartbeat brings the same few names
                name = sys.intern(name) if len(counts) < MAX_LABELS else OTHER_LABEL
            counts[name] = counts.get(name, 0) + growth


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
        """End an interval; to be repeated."""
        await self._registry.refresh()
        self._history.sample(self._registry.directory.records())

    async def of(self, principal: Principal, max_samples: int) -> OverviewView:
        """Return what `principal` may see."""
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
        totals = no_work()
        for record in records:
            if record.figures is not None:
                grow(totals, record.figures)
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
            totals=totals,
            interval_s=self.interval_s,
            samples=samples,
            hot_chunks=[
                HotChunkView(chunk_id=chunk_id, num_pulls=num_pulls)
                for chunk_id, num_pulls in hottest
            ],
        )


def _seen(record: PeerRecord, now_s: float) -> SeenPeerView:
    peer = PeerView.model_validate(record.status(now_s))
    told = record.figures
    figures = None
    if told is not None:
        values = msgspec.structs.asdict(told)
        del values["pulled_bytes"]
        values["tiers"] = [TierBody.model_validate(tier) for tier in told.tiers]
        figures = SeenFiguresView.model_construct(**values)
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
