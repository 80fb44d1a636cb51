"""Answers to lookups as MessagePack: chunks of a prompt mostly lie at the same places, which are
then named once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from lmcache_core.lookup.messages import (
    MAX_CHUNKS_PER_LOOKUP,
    MAX_HOLDERS_PER_CHUNK,
    Holder,
    InstanceKind,
    InstanceText,
    LookupAnswer,
    SizeBytes,
    TierText,
)


class PackedHolder(msgspec.Struct, frozen=True, array_like=True):
    """`Holder` as MessagePack: an array."""

    instance: InstanceText
    kind: InstanceKind
    tier: TierText
    size_bytes: SizeBytes


class HolderRun(msgspec.Struct, frozen=True, array_like=True):
    """So many chunks, one behind the other, that have the same holders."""

    num_chunks: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNKS_PER_LOOKUP)]
    holders: Annotated[
        list[PackedHolder], msgspec.Meta(min_length=1, max_length=MAX_HOLDERS_PER_CHUNK)
    ]

    def unpack(self) -> list[Holder]:
        """The holders."""
        return [Holder(one.instance, one.kind, one.tier, one.size_bytes) for one in self.holders]


class PackedLookupAnswer(msgspec.Struct, frozen=True):
    """`LookupAnswer` as MessagePack: the prefix is `runs`, one behind the other."""

    num_prefix: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS_PER_LOOKUP)]
    runs: Annotated[list[HolderRun], msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP)]
    degraded: bool = False

    def unpack(self) -> LookupAnswer:
        """The answer; chunks of a run share one list of holders.

        Raises:
            ValueError: The runs are not `num_prefix` chunks long.
        """
        if sum(run.num_chunks for run in self.runs) != self.num_prefix:
            raise ValueError(f"its runs do not add up to {self.num_prefix} chunks")
        holders: list[list[Holder]] = []
        for run in self.runs:
            holders += [run.unpack()] * run.num_chunks
        return LookupAnswer(self.num_prefix, holders, self.degraded)


def pack_run(num_chunks: int, holders: Sequence[Holder]) -> HolderRun:
    """A run of chunks that all have these holders, of which the first 16 are named."""
    named = [
        PackedHolder(one.instance, one.kind, one.tier, one.size_bytes)
        for one in holders[:MAX_HOLDERS_PER_CHUNK]
    ]
    return HolderRun(num_chunks, named)
