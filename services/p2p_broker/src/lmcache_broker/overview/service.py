"""Brings together what the broker knows of the peers, for one who looks."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from lmcache_core.security import Principal, unix_ms

from lmcache_broker.overview.history import History, Work
from lmcache_broker.overview.schemas import (
    HotChunkView,
    LinkView,
    OverviewView,
    SampleView,
    SeenFiguresView,
    SeenPeerView,
    WorkView,
)
from lmcache_broker.peers.record import PeerRecord
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.peers.schemas import PeerView, TierBody
from lmcache_broker.peers.service import SHARED_OWNER
from lmcache_broker.transfers.hot import HotChunks

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


class Overview:
    """See `OverviewView`. What it shows is checked already and not checked again: people look while
    peers pull.

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
        totals = Work()
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


def _work(work: Work) -> WorkView:
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
