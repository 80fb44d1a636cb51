"""What peers did over the last while: the growth of what their heartbeats count, interval by
interval.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lmcache_core.p2p import PeerFigures
from lmcache_core.security import unix_ms

from lmcache_broker.peers.record import PeerRecord

MAX_SAMPLES: Final = 360
MAX_SAMPLED_OWNERS: Final = 256
"""Tenants whose work is remembered; of further ones only the present is known."""
MAX_LABELS: Final = 64
"""Names of one kind that are counted by themselves; peers may tell any."""
OTHER_LABEL: Final = "other"
"""Further ones, together."""


@dataclass(slots=True)
class Work:
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

    def merge(self, other: Work) -> None:
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
    work: Work


class History:
    """The last `MAX_SAMPLES` intervals, by owner.

    What a peer counted before this broker first heard of it belongs to no interval; a new life of a
    peer that was known counts from 0.

    Args:
        wall_ms: Unix time in milliseconds.
    """

    def __init__(self, wall_ms: Callable[[], int] = unix_ms) -> None:
        self._wall_ms = wall_ms
        self._samples: deque[tuple[int, Mapping[str, Work]]] = deque(maxlen=MAX_SAMPLES)
        self._last: dict[str, tuple[int, PeerFigures]] = {}

    def sample(self, records: Iterable[PeerRecord]) -> None:
        """An interval is over.

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
            is_same_life = incarnation == record.peer.incarnation
            by_owner.setdefault(record.owner, Work()).add(figures, before if is_same_life else None)
        self._last = seen
        self._samples.append((self._wall_ms(), by_owner))

    def of(self, owners: Collection[str], max_samples: int = MAX_SAMPLES) -> list[Sample]:
        """The latest intervals, the oldest first, of these owners together."""
        found = []
        for ended_ms, by_owner in list(self._samples)[
            len(self._samples) - min(max_samples, len(self._samples)) :
        ]:
            work = Work()
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
        if name not in counts:  # interned: each heartbeat brings the same few names anew
            name = sys.intern(name) if len(counts) < MAX_LABELS else OTHER_LABEL
        counts[name] += growth
