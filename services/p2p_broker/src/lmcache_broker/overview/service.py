"""Brings together what the broker knows of the peers, for one who looks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import msgspec
from lmcache_core.security import Principal, unix_ms

from lmcache_broker.overview.history import History, Work
from lmcache_broker.overview.schemas import HotChunkView, LinkView, OverviewView, SampleView, SeenPeerView, WorkView
from lmcache_broker.peers.record import PeerRecord
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.peers.schemas import FiguresBody, PeerView
from lmcache_broker.peers.service import SHARED_OWNER
from lmcache_broker.transfers.hot import HotChunks

MAX_SHOWN_PEERS: Final = 256
MAX_SHOWN_LINKS: Final = 512
MAX_SHOWN_CHUNKS: Final = 10


class Overview:
    """See `OverviewView`.

    Args:
        registry: The peers.
        hot: What they pull most.
        interval_s: Between two samples.

    Attributes:
        interval_s: See above.
    """

    def __init__(self, registry: PeerRegistry, hot: HotChunks, interval_s: float) -> None:
        self.interval_s = interval_s
        self._registry = registry
        self._hot = hot
        self._history = History()

    async def sample(self) -> None:
        """An interval is over; to be repeated."""
        await self._registry.refresh()
        self._history.sample(self._registry.directory.records())

    async def of(self, principal: Principal, max_samples: int) -> OverviewView:
        """What `principal` may see."""
        await self._registry.refresh()
        records = sorted(self._registry.directory.records(principal), key=lambda record: (not record.draining, record.peer.id))
        totals = Work()
        for record in records:
            if record.figures is not None:
                totals.add(record.figures)
        now_s = time.monotonic()
        samples = self._history.of((principal.tenant, SHARED_OWNER), max_samples)
        hottest = self._hot.hottest(principal.tenant, MAX_SHOWN_CHUNKS, now_s)
        return OverviewView(
            time_ms=unix_ms(),
            is_shared=self._registry.is_shared,
            num_peers=len(records),
            peers=[_seen(record, now_s) for record in records[:MAX_SHOWN_PEERS]],
            links=_links(records),
            totals=WorkView.model_validate(totals),
            interval_s=self.interval_s,
            samples=[SampleView.model_validate(sample) for sample in samples],
            hot_chunks=[HotChunkView(chunk_id=chunk_id, num_pulls=num_pulls) for chunk_id, num_pulls in hottest],
        )


def _seen(record: PeerRecord, now_s: float) -> SeenPeerView:
    peer = PeerView.model_validate(record.status(now_s))
    figures = None
    if record.figures is not None:
        fields = msgspec.to_builtins(record.figures)
        figures = FiguresBody.model_validate(fields | {"tiers": list(fields.get("tiers", ()))})
    return SeenPeerView(**dict(peer), figures=figures)


def _links(records: Iterable[PeerRecord]) -> list[LinkView]:
    found = [
        LinkView(requester=record.peer.id, server=server, num_bytes=num_bytes)
        for record in records
        if record.figures is not None
        for server, num_bytes in record.figures.pulled_bytes.items()
        if num_bytes
    ]
    return sorted(found, key=lambda link: (-link.num_bytes, link.requester, link.server))[:MAX_SHOWN_LINKS]
