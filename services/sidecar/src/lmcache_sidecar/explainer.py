"""Where chunks are, and why they are missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import Holder
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage.peer import PEER_TIER
from lmcache_core.storage.tiers import TierSet

from lmcache_sidecar.holders import Holders

MAX_QUESTIONS = 64
"""To lookup, for the chunks of one rank and group."""
QUARANTINED = "quarantined"
UNKNOWN = "unknown"

PlaceState = Literal["present", "refused", "unknown"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """A tier that has a chunk, or may have it.

    Attributes:
        tier: Its name.
        state: `refused`: it is there and is not served, because of its encoding. `unknown`: the
            tier did not answer in time.
        num_bytes: Of the record there.
        age_s: Since it was stored there, seconds.
        num_holders: References on it beside the tier's own.
        lossy: Whether it has lost something.
        peers: Who holds it, for the tier of peers.
    """

    tier: str
    state: PlaceState = "present"
    num_bytes: int | None = None
    age_s: float | None = None
    num_holders: int | None = None
    lossy: bool | None = None
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyState:
    """What became of one chunk of one rank and group.

    Attributes:
        places: Where it is or may be, the fastest tier first.
        missing: Why no tier is known to have it; None when one has it.
    """

    places: tuple[Place, ...]
    missing: str | None


_Found = Sequence[Place | MissReason]


class Explainer:
    """Asks every tier, without counting it as a read.

    Args:
        tiers: Of this sidecar.
        holders: Tells what peers have; None without lookup.
        timeout_s: Longest wait for a tier; what has not answered by then is unknown.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        tiers: TierSet,
        holders: Holders | None,
        timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._hot = tiers.hot
        self._listed = tiers.disk_files
        self._disk = tiers.disk
        self._remote = tiers.remote
        self._holders = holders
        self._timeout_s = timeout_s
        self._clock = clock

    async def states(self, keys: Sequence[ChunkKey]) -> list[KeyState]:
        """The state of each, in order; chunks of one prompt should stand in its order."""
        asked = (self._on_disk(keys), self._at_peers(keys), self._in_remote(keys))
        found = [tier for tier in (self._in_memory(keys), *await asyncio.gather(*asked)) if tier]
        return [_state([tier[i] for tier in found]) for i in range(len(keys))]

    def _in_memory(self, keys: Sequence[ChunkKey]) -> _Found:
        return [
            (
                held.reason
                if isinstance(held, Miss)
                else Place(
                    self._hot.name,
                    "present",
                    held.num_bytes,
                    self._age_s(held.stored_at),
                    held.num_holders,
                    held.lossy,
                )
            )
            for held in self._hot.peek_many(keys)
        ]

    async def _on_disk(self, keys: Sequence[ChunkKey]) -> _Found:
        if self._listed is None or self._disk is None:
            return ()
        served = await self._bounded(self._disk.batched_contains(keys))
        found: list[Place | MissReason] = []
        for i, entry in enumerate(self._listed.peek_many(keys)):
            if isinstance(entry, Miss):
                found.append(entry.reason)
                continue
            state: PlaceState = (
                "unknown" if served is None else "present" if served[i] else "refused"
            )
            found.append(
                Place(
                    self._listed.name,
                    state,
                    entry.record_bytes,
                    self._age_s(entry.stored_at),
                    lossy=entry.lossy,
                )
            )
        return found

    async def _at_peers(self, keys: Sequence[ChunkKey]) -> _Found:
        if self._holders is None:
            return ()
        found: list[Place | MissReason] = [Place(PEER_TIER, "unknown")] * len(keys)
        await self._bounded(self._ask_lookup(self._holders, keys, found))
        return found

    async def _ask_lookup(
        self, holders: Holders, keys: Sequence[ChunkKey], found: list[Place | MissReason]
    ) -> None:
        """Fill in what is known of peers: of each rank and group by itself, as only in their
        order chunks make a prefix.
        """
        chains: dict[tuple[int, str], list[int]] = {}
        for i, key in enumerate(keys):
            chains.setdefault((key.key.worker_id, key.key.group), []).append(i)
        for chain in chains.values():
            answer = await holders.of([keys[i].key.chunk_id() for i in chain], MAX_QUESTIONS)
            for i, holding in zip(chain, answer, strict=True):
                if holding is not None:
                    found[i] = _held_by(holding)

    async def _in_remote(self, keys: Sequence[ChunkKey]) -> _Found:
        if self._remote is None:
            return ()
        name = self._remote.name
        present = await self._bounded(self._remote.batched_contains(keys))
        if present is None:
            return [Place(name, "unknown")] * len(keys)
        return [Place(name) if is_there else MissReason.NEVER_STORED for is_there in present]

    async def _bounded(self, work: Awaitable[T]) -> T | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except (TimeoutError, UnavailableError):
            return None

    def _age_s(self, stored_at: float | None) -> float | None:
        return None if stored_at is None else max(0.0, self._clock() - stored_at)


def _held_by(holders: Sequence[Holder]) -> Place | MissReason:
    return (
        Place(PEER_TIER, peers=tuple(holder.instance for holder in holders))
        if holders
        else MissReason.NEVER_STORED
    )


def _state(found: Sequence[Place | MissReason]) -> KeyState:
    places = tuple(place for place in found if isinstance(place, Place))
    return KeyState(
        places, _why_missing(places, [reason for reason in found if isinstance(reason, MissReason)])
    )


def _why_missing(places: Sequence[Place], reasons: Sequence[MissReason]) -> str | None:
    """What is known for certain comes before what could not be asked."""
    states = {place.state for place in places}
    if "present" in states:
        return None
    if "refused" in states:
        return MissReason.ENCODING.value
    if MissReason.CORRUPT in reasons:
        return QUARANTINED
    known = next((reason for reason in reasons if reason is not MissReason.NEVER_STORED), None)
    if known is not None:
        return known.value
    return UNKNOWN if "unknown" in states else MissReason.NEVER_STORED.value
