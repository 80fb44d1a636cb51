"""Counters that an instance reports to the broker with each heartbeat, for display. They decide
nothing but which pod Kubernetes may end at the least loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

MAX_TIERS: Final = 16
MAX_COUNTED_LABELS: Final = 32
"""Names in one table: tiers, reasons of misses."""
MAX_COUNTED_PEERS: Final = 64
MAX_LABEL_CHARS: Final = 253
MAX_COUNT: Final = (1 << 53) - 1
"""Larger numbers are not the same in every JSON."""

BoundedCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
Counts = Annotated[dict[Label, BoundedCount], msgspec.Meta(max_length=MAX_COUNTED_LABELS)]


class TierFigures(msgspec.Struct, frozen=True):
    """How full one tier is.

    Attributes:
        capacity_bytes: 0 where it is not known.
    """

    name: Label
    num_chunks: BoundedCount
    used_bytes: BoundedCount
    capacity_bytes: BoundedCount


class PeerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters of an instance since its start, and what it holds now. All of it is optional.

    Attributes:
        requested_chunks: Chunks that engines asked for.
        loaded_chunks: Chunks that engines got, by tier.
        loaded_bytes: Bytes of these, by tier.
        missed_chunks: Chunks that engines did not get, by reason.
        stored_chunks: Chunks that engines stored.
        stored_bytes: Bytes of these.
        pulled_bytes: Bytes that came from peers, by the peer's id.
        tiers: How full its own tiers are.
        sole_bytes: Bytes of chunks without another holder, as far as the instance knows; null
            where it does not.
    """

    requested_chunks: BoundedCount = 0
    loaded_chunks: Counts = {}
    loaded_bytes: Counts = {}
    missed_chunks: Counts = {}
    stored_chunks: BoundedCount = 0
    stored_bytes: BoundedCount = 0
    pulled_bytes: Annotated[
        dict[Label, BoundedCount], msgspec.Meta(max_length=MAX_COUNTED_PEERS)
    ] = {}
    tiers: Annotated[tuple[TierFigures, ...], msgspec.Meta(max_length=MAX_TIERS)] = ()
    sole_bytes: BoundedCount | None = None


def bounded(counts: Mapping[str, int], max_names: int = MAX_COUNTED_LABELS) -> dict[str, int]:
    """Return the largest of these counts, at most so many, with names that a heartbeat may hold."""
    named = (
        (name, min(count, MAX_COUNT))
        for name, count in counts.items()
        if 0 < len(name) <= MAX_LABEL_CHARS
    )
    return dict(sorted(named, key=lambda entry: (-entry[1], entry[0]))[:max_names])


def tier_figures(stats: Mapping[str, Mapping[str, int]]) -> tuple[TierFigures, ...]:
    """Return how full tiers are.

    Args:
        stats: `StorageBackend.stats` of each, by its name.
    """
    return tuple(
        TierFigures(
            name,
            figures.get("num_chunks", 0),
            figures.get("used_bytes", 0),
            figures.get("capacity_bytes", 0),
        )
        for name, figures in list(stats.items())[:MAX_TIERS]
    )
