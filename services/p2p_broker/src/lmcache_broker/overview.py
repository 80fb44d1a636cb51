"""The peers and their work, now and over the last hour: the data of the web page."""

from __future__ import annotations

import heapq
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from lmcache_core.p2p import ModelFigures, PeerFigures, PeerStatus, TierFigures
from lmcache_core.security import SHARED_OWNER, Principal, unix_ms

from lmcache_broker.peers.record import PeerRecord
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.settings import BrokerSettings
from lmcache_broker.transfers.hot import HotChunks, HotPrefix

MAX_SAMPLES: Final = 360
MAX_SAMPLED_OWNERS: Final = 256
"""Tenants with a history; for further ones only current figures are known."""
MAX_LABELS: Final = 32
"""Names of one kind that are counted one by one; peers may report any. Others count together."""
OTHER_LABEL: Final = "other"
MAX_SHOWN_PEERS: Final = 256
MAX_SHOWN_LINKS: Final = 512
MAX_SHOWN_CHUNKS: Final = 10
MAX_SHOWN_TENANTS: Final = 10
WINDOWS_S: Final = (300, 3600, 86_400)
"""For which the page says what was gained."""
BUCKETS_S: Final = (0, 300, 3600)
"""Least length of the buckets of work that make up each of these windows; 0: each sample is one."""
MAX_CELLS: Final = 65_536
"""Counts that the buckets for one window hold; beyond, the oldest buckets go. A count takes about
100 bytes and its name."""
MAX_KEPT_VIEWS: Final = 16
MIN_KEPT_COST_S: Final = 0.002
REST_PER_COST: Final = 20
"""A view that cost more CPU than the above is kept for its tenant for this many times its cost, at
most for `MAX_REST_S`. A small cluster is always shown in its present state.
"""
MAX_REST_S: Final = 4.0


class SeenFigures(msgspec.Struct, frozen=True):
    """Counters of a peer since its start, and what it holds now. `links` has its pulls.

    Attributes:
        requested_chunks: Chunks that engines asked for.
        loaded_chunks: Chunks that engines got, by tier.
        loaded_bytes: Their bytes, by tier.
        missed_chunks: Chunks that engines did not get, by reason.
        stored_chunks: Chunks that engines stored.
        stored_bytes: Their bytes.
        tiers: Fill levels of its own tiers.
        sole_bytes: Bytes of chunks without another holder, as far as the peer knows; null if it
            does not know.
        models: What it saved, by model.
    """

    requested_chunks: int
    loaded_chunks: dict[str, int]
    loaded_bytes: dict[str, int]
    missed_chunks: dict[str, int]
    stored_chunks: int
    stored_bytes: int
    tiers: tuple[TierFigures, ...]
    sole_bytes: int | None
    models: dict[str, ModelFigures]


class SeenPeer(PeerStatus, frozen=True, kw_only=True):
    """A live peer and its work.

    Attributes:
        figures: Its counters; null if it reports none.
    """

    figures: SeenFigures | None


class PeerTraffic(msgspec.Struct, frozen=True):
    """Bytes that one peer has pulled from another since the requester's start.

    Attributes:
        requester: Id of the peer that pulled.
        server: Id of the peer that served.
        num_bytes: Bytes received.
    """

    requester: str
    server: str
    num_bytes: int


class Work(msgspec.Struct):
    """Chunks that engines asked for, got and stored. Of tiers, reasons and models the first 32 are
    named; further ones count as `other`.

    Attributes:
        requested_chunks: Chunks that engines asked for.
        loaded_chunks: Chunks that they got, by tier.
        loaded_bytes: Their bytes, by tier.
        missed_chunks: Chunks that they did not get, by reason.
        stored_bytes: Bytes of the chunks that they stored.
        saved_tokens: Tokens whose KV was loaded instead of computed, by model.
        saved_ms: Milliseconds of prefill for these, by model; 0 if engines do not know their speed.
    """

    requested_chunks: int = 0
    loaded_chunks: dict[str, int] = {}
    loaded_bytes: dict[str, int] = {}
    missed_chunks: dict[str, int] = {}
    stored_bytes: int = 0
    saved_tokens: dict[str, int] = {}
    saved_ms: dict[str, int] = {}


class Sample(msgspec.Struct, frozen=True):
    """The work of one interval.

    Attributes:
        ended_ms: End of the interval, Unix time in milliseconds.
        work: What the peers counted in it.
    """

    ended_ms: int
    work: Work


class Window(msgspec.Struct, frozen=True):
    """The work of the latest time.

    Attributes:
        window_s: Length of that time, in seconds.
        watched_s: Seconds that `work` covers: fewer if this broker started later, up to one bucket
            (a sample, 5 minutes, an hour) more otherwise.
        work: What the peers counted in them.
    """

    window_s: int
    watched_s: float
    work: Work


class TenantSavings(msgspec.Struct, frozen=True):
    """What a tenant did not compute.

    Attributes:
        tenant: Its name.
        saved_tokens: Tokens whose KV was loaded instead of computed, for each of the windows.
        saved_ms: Milliseconds of prefill for those of the last window.
    """

    tenant: str
    saved_tokens: list[int]
    saved_ms: int


class HotChunk(msgspec.Struct, frozen=True):
    """The last chunk of a prefix that peers pull. Its id stands for the whole prefix: it is a hash
    of all tokens up to its end. Chunks of one prompt that are pulled equally often count as one.

    Attributes:
        chunk_id: 32 hex digits.
        num_pulls: Pulls of it that this broker granted within the last minute.
        num_chunks: Chunks pulled together, up to this one.
        num_tokens: Their tokens; null if the requester does not report them.
        model: The requester's; null if it has none or several.
        num_holders: Instances that have it.
    """

    chunk_id: str
    num_pulls: int
    num_chunks: int
    num_tokens: int | None
    model: str | None
    num_holders: int


class Overview(msgspec.Struct, frozen=True):
    """The peers of the caller's tenant and the shared ones, as this broker knows them.

    Attributes:
        time_ms: When this was composed, Unix time in milliseconds; up to 4 s ago in a large
            cluster.
        title: What the broker's settings call this installation; may be empty.
        version: The broker's release.
        docs_url: Where its settings say that the documentation is.
        broker: Instance id of the broker that answers.
        tenant: The caller's tenant.
        shares: Whether this broker is configured to share peers with others.
        is_shared: Whether the peer store shared by brokers answers this broker; false without one.
        num_peers: Live peers; `peers` may have fewer.
        peers: Draining ones first; at most 256.
        links: The strongest; at most 512.
        totals: Of all these peers since the start of each.
        interval_s: Length of a sample, in seconds.
        windows: The last 5 minutes, hour and day.
        samples: The latest intervals since this broker's start, the oldest first; at most 360.
        hot_chunks: The prefixes that are pulled most; at most 10.
        tenants: The tenants that saved most in the last day, at most 10; empty unless the caller is
            an admin.
    """

    time_ms: int
    title: str
    version: str
    docs_url: str | None
    broker: str
    tenant: str
    shares: bool
    is_shared: bool
    num_peers: int
    peers: list[SeenPeer]
    links: list[PeerTraffic]
    totals: Work
    interval_s: float
    windows: list[Window]
    samples: list[Sample]
    hot_chunks: list[HotChunk]
    tenants: list[TenantSavings]


@dataclass(slots=True)
class _Bucket:
    """The work of one interval, by owner."""

    began_ms: int
    ended_ms: int
    by_owner: dict[str, Work]

    def num_cells(self) -> int:
        """Return the number of its counts; empty dictionaries take space, too."""
        return sum(
            5
            + len(work.loaded_chunks)
            + len(work.loaded_bytes)
            + len(work.missed_chunks)
            + len(work.saved_tokens)
            + len(work.saved_ms)
            for work in self.by_owner.values()
        )

    def add_to(self, work: Work, owners: Collection[str]) -> None:
        for owner in owners:
            if owner in self.by_owner:
                grow(work, self.by_owner[owner])


class _Buckets(deque[_Bucket]):
    """The latest buckets, the oldest first.

    Args:
        bucket_s: A bucket collects intervals until it is this long.
        max_buckets: Further ones displace the oldest, as more than `MAX_CELLS` counts do.
    """

    def __init__(self, bucket_s: int, max_buckets: int) -> None:
        super().__init__(maxlen=max_buckets)
        self._bucket_ms = 1000 * bucket_s

    def add(self, began_ms: int, ended_ms: int, by_owner: Mapping[str, Work]) -> None:
        if not self or self[-1].ended_ms - self[-1].began_ms >= self._bucket_ms:
            self.append(_Bucket(began_ms, ended_ms, {}))
        last = self[-1]
        last.ended_ms = ended_ms
        for owner, work in by_owner.items():
            if work != Work() and (
                owner in last.by_owner or len(last.by_owner) < MAX_SAMPLED_OWNERS
            ):
                grow(last.by_owner.setdefault(owner, Work()), work)
        num_cells = sum(bucket.num_cells() for bucket in self)
        while num_cells > MAX_CELLS and len(self) > 1:
            num_cells -= self.popleft().num_cells()


class History:
    """The last `MAX_SAMPLES` intervals, and the last hour and day in buckets.

    What a peer counted before this broker first heard of it belongs to no interval. A new
    incarnation counts from 0 if its counters fell. If they did not, the same process took a new
    incarnation, as an undrain does.
    """

    def __init__(self, wall_ms: Callable[[], int] = unix_ms) -> None:
        self._wall_ms = wall_ms
        self._by_window = {
            window_s: _Buckets(bucket_s, window_s // bucket_s + 1 if bucket_s else MAX_SAMPLES)
            for window_s, bucket_s in zip(WINDOWS_S, BUCKETS_S, strict=True)
        }
        self._samples = self._by_window[WINDOWS_S[0]]
        self._ended_ms: int | None = None
        self._last: dict[str, tuple[int, PeerFigures]] = {}

    def sample(self, records: Iterable[PeerRecord]) -> None:
        """End an interval.

        Args:
            records: All live peers.
        """
        by_owner: dict[str, Work] = {}
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
            if incarnation != record.peer.incarnation and _fell(figures, before):
                before = PeerFigures()
            grow(by_owner.setdefault(record.owner, Work()), figures, before)
        self._last = seen
        ended_ms = self._wall_ms()
        began_ms = ended_ms if self._ended_ms is None else self._ended_ms
        self._ended_ms = ended_ms
        for buckets in self._by_window.values():
            buckets.add(began_ms, ended_ms, by_owner)

    def windows(self, owners: Collection[str]) -> list[Window]:
        """Return the combined work of these owners for each of `WINDOWS_S`."""
        now_ms = self._wall_ms()
        found = []
        for window_s, buckets in self._by_window.items():
            part = [one for one in buckets if one.ended_ms > now_ms - 1000 * window_s]
            work = Work()
            for bucket in part:
                bucket.add_to(work, owners)
            watched_s = max(0, now_ms - part[0].began_ms) / 1000 if part else 0.0
            found.append(Window(window_s, watched_s, work))
        return found

    def tenants(self) -> list[TenantSavings]:
        """Return the tenants that saved most in the last and longest window, for each of
        `WINDOWS_S`.
        """
        now_ms = self._wall_ms()
        tokens: dict[str, list[int]] = {}
        saved_ms: Counter[str] = Counter()
        for i, (window_s, buckets) in enumerate(self._by_window.items()):
            for bucket in buckets:
                if bucket.ended_ms <= now_ms - 1000 * window_s:
                    continue
                for owner, work in bucket.by_owner.items():
                    tokens.setdefault(owner, [0] * len(WINDOWS_S))[i] += sum(
                        work.saved_tokens.values()
                    )
                    if window_s == WINDOWS_S[-1]:
                        saved_ms[owner] += sum(work.saved_ms.values())
        most = heapq.nlargest(
            MAX_SHOWN_TENANTS,
            (owner for owner in tokens if any(tokens[owner])),
            key=lambda owner: (tokens[owner][-1], owner),
        )
        return [TenantSavings(owner, tokens[owner], saved_ms[owner]) for owner in most]

    def of(self, owners: Collection[str], max_samples: int = MAX_SAMPLES) -> list[Sample]:
        """Return the latest intervals of these owners combined, the oldest first."""
        found = []
        for bucket in list(self._samples)[max(0, len(self._samples) - max_samples) :]:
            work = Work()
            bucket.add_to(work, owners)
            found.append(Sample(bucket.ended_ms, work))
        return found


def grow(
    work: Work,
    now: Work | PeerFigures,
    before: PeerFigures = PeerFigures(),  # noqa: B008
) -> None:
    """Add to `work` what was counted since `before`; counts only grow."""
    saved_tokens, saved_ms = _saved(now)
    tokens_before, ms_before = _saved(before)
    work.requested_chunks += max(0, now.requested_chunks - before.requested_chunks)
    work.stored_bytes += max(0, now.stored_bytes - before.stored_bytes)
    for counts, new, old in (
        (work.loaded_chunks, now.loaded_chunks, before.loaded_chunks),
        (work.loaded_bytes, now.loaded_bytes, before.loaded_bytes),
        (work.missed_chunks, now.missed_chunks, before.missed_chunks),
        (work.saved_tokens, saved_tokens, tokens_before),
        (work.saved_ms, saved_ms, ms_before),
    ):
        for name, count in new.items():
            growth = count - old.get(name, 0)
            if growth <= 0:
                continue
            if name not in counts and len(counts) >= MAX_LABELS:
                name = OTHER_LABEL
            counts[name] = counts.get(name, 0) + growth


def _fell(now: PeerFigures, before: PeerFigures) -> bool:
    """Return whether a counter is lower than before, which means that another process counts."""
    return (
        now.requested_chunks < before.requested_chunks
        or now.stored_chunks < before.stored_chunks
        or now.stored_bytes < before.stored_bytes
    )


def _saved(of: Work | PeerFigures) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return tokens and milliseconds by model."""
    if isinstance(of, Work):
        return of.saved_tokens, of.saved_ms
    return (
        {model: one.saved_tokens for model, one in of.models.items()},
        {model: one.saved_ms for model, one in of.models.items()},
    )


class BrokerOverview:
    """Builds `Overview`.

    Args:
        version: This broker's release.
    """

    def __init__(
        self, settings: BrokerSettings, version: str, registry: PeerRegistry, hot: HotChunks
    ) -> None:
        self._settings = settings
        self._version = version
        self._registry = registry
        self._hot = hot
        self._history = History()
        self._kept: OrderedDict[tuple[str, bool], tuple[float, Overview]] = OrderedDict()

    async def sample(self) -> None:
        """End an interval. Call it repeatedly."""
        await self._registry.refresh()
        self._history.sample(self._registry.directory.records())

    async def of(self, principal: Principal, max_samples: int) -> Overview:
        """Return what `principal` may see."""
        await self._registry.refresh()
        view = self._view(principal)
        if max_samples >= len(view.samples):
            return view
        return msgspec.structs.replace(
            view, samples=view.samples[len(view.samples) - max_samples :]
        )

    def _view(self, principal: Principal) -> Overview:
        """Return everything that `principal` may see; a recent view is reused if building it took
        long.
        """
        seer = principal.tenant, principal.role == "admin"
        until_s, kept = self._kept.get(seer, (0.0, None))
        if kept is not None and time.monotonic() < until_s:
            return kept
        began_s = time.thread_time()
        view = self._build(principal)
        cost_s = time.thread_time() - began_s
        self._kept.pop(seer, None)
        if cost_s >= MIN_KEPT_COST_S:
            until_s = time.monotonic() + min(MAX_REST_S, REST_PER_COST * cost_s)
            self._kept[seer] = (until_s, view)
            if len(self._kept) > MAX_KEPT_VIEWS:
                self._kept.popitem(last=False)
        return view

    def _build(self, principal: Principal) -> Overview:
        records = sorted(
            self._registry.directory.records(principal),
            key=lambda record: (not record.draining, record.peer.id),
        )
        totals = Work()
        for record in records:
            if record.figures is not None:
                grow(totals, record.figures)
        now_s = time.monotonic()
        owners = (principal.tenant, SHARED_OWNER)
        models = {
            record.peer.id: record.figures.models
            for record in records
            if record.figures is not None
        }
        return Overview(
            time_ms=unix_ms(),
            title=self._settings.page_title,
            version=self._version,
            docs_url=self._settings.docs_url,
            broker=self._settings.instance_id,
            tenant=principal.tenant,
            shares=self._registry.shares,
            is_shared=self._registry.is_shared,
            num_peers=len(records),
            peers=[_seen(record, now_s) for record in records[:MAX_SHOWN_PEERS]],
            links=_links(records),
            totals=totals,
            interval_s=self._settings.history_interval_s,
            windows=self._history.windows(owners),
            samples=self._history.of(owners),
            hot_chunks=[
                _shown_prefix(prefix, models.get(prefix.requester, {}))
                for prefix in self._hot.hottest(principal.tenant, MAX_SHOWN_CHUNKS, now_s)
            ],
            tenants=self._history.tenants() if principal.role == "admin" else [],
        )


def _shown_prefix(prefix: HotPrefix, models: Mapping[str, ModelFigures]) -> HotChunk:
    """Describe a prefix by its requester's model. Chunk ids reveal neither model nor tokens."""
    [model, figures] = next(iter(models.items())) if len(models) == 1 else (None, ModelFigures())
    num_tokens = round(prefix.num_chunks * figures.chunk_tokens)
    return HotChunk(
        prefix.chunk_id,
        prefix.num_pulls,
        prefix.num_chunks,
        num_tokens or None,
        model,
        prefix.num_holders,
    )


def _seen(record: PeerRecord, now_s: float) -> SeenPeer:
    figures = None
    if record.figures is not None:
        values = msgspec.structs.asdict(record.figures)
        del values["pulled_bytes"]
        figures = SeenFigures(**values)
    return SeenPeer(**msgspec.structs.asdict(record.status(now_s)), figures=figures)


def _links(records: Iterable[PeerRecord]) -> list[PeerTraffic]:
    found = (
        (-num_bytes, record.peer.id, server)
        for record in records
        if record.figures is not None
        for server, num_bytes in record.figures.pulled_bytes.items()
        if num_bytes
    )
    strongest = heapq.nsmallest(MAX_SHOWN_LINKS, found)
    return [PeerTraffic(requester, server, -less) for less, requester, server in strongest]
