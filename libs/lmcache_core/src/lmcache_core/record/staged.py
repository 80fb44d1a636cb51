"""What a chunk store promises of chunks before they are loaded. No torch."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

HOT_TIER = "Hot"
"""The name of the tier in host memory."""


class StagedFrom(IntEnum):
    """Where a staged chunk was found; the values are those of the bytes in `Staged.tiers`."""

    NOWHERE = 0
    """It is not there for all ranks, or nothing is promised of it."""
    HOT = 1
    """It was in host memory."""
    DISK = 2
    PEER = 3
    REMOTE = 4
    OTHER = 5
    """A tier that has no number of its own."""


class Staged(NamedTuple):
    """What is in host memory, for all ranks of a chain, and stays there until the ticket is given
    back.

    Attributes:
        is_ready: Nothing more will come: no lift was needed, or it is over.
        tiers: For each chain one byte a chunk, a `StagedFrom`; nothing while the store has not
            answered.
    """

    is_ready: bool
    tiers: tuple[bytes, ...]
