"""What an instance tells the broker of its work with each heartbeat, for people who look at the
cluster. Nothing is decided by it but which pod may be ended at the least loss.
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

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class TierFigures(msgspec.Struct, frozen=True):
    """How full one tier is.

    Attributes:
        name: The tier's.
        num_chunks: Chunks that it holds.
        used_bytes: What they take.
        capacity_bytes: What it may take; 0 where that is not known here.
    """

    name: Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARS)]
    num_chunks: _Count
    used_bytes: _Count
    capacity_bytes: _Count


class PeerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts since the instance's start, and what it holds now. All of it may be left out; what is
    not known is passed over.

    Attributes:
        requested_chunks: Chunks that engines wanted.
        loaded_chunks: Chunks that they got, by the tier that had them.
        loaded_bytes: Bytes of these.
        missed_chunks: Chunks that they did not get, by reason.
        stored_chunks: Chunks that engines stored.
        stored_bytes: Bytes of these.
        pulled_bytes: Bytes that came from peers, by the peer's id.
        tiers: How full its own tiers are.
        sole_bytes: Bytes of chunks that no other peer holds, as far as it knows; None where it does
            not.
    """

    requested_chunks: _Count = 0
    loaded_chunks: dict[str, _Count] = {}
    loaded_bytes: dict[str, _Count] = {}
    missed_chunks: dict[str, _Count] = {}
    stored_chunks: _Count = 0
    stored_bytes: _Count = 0
    pulled_bytes: dict[str, _Count] = {}
    tiers: tuple[TierFigures, ...] = ()
    sole_bytes: _Count | None = None


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
