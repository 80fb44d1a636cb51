"""Moves chunks to their homes among other servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.remote.members import Member
from lmcache_core.storage.remote.rendezvous import home
from lmcache_core.telemetry import Counters

from lmcache_storage import metrics
from lmcache_storage.handover.held import HeldChunks
from lmcache_storage.handover.neighbours import Neighbours
from lmcache_storage.handover.progress import Moved

logger = logging.getLogger(__name__)

WINDOW_CHUNKS = 128
WINDOW_BYTES = 256 << 20
"""Of the chunks that are on their way at once, if they are more than one."""
BATCH_CHUNKS = 16
BATCH_BYTES = 32 << 20
"""Of those that one server is sent at once, if they are more than one."""
MAX_CHOICES = 3
"""Servers that a chunk is offered to, one after the other."""
SEND_TIMEOUT_S = 5.0

Sized = tuple[ChunkKey, int]


@dataclass(slots=True)
class Outcome:
    """What became of a batch: chunks that are there now, and those that were not taken."""

    settled: list[ChunkKey] = field(default_factory=list)
    refused: list[Sized] = field(default_factory=list)


class Mover:
    """Sends chunks in windows; the servers of a window are sent to side by side.

    Args:
        chunks: What there is here.
        neighbours: Who takes them.
        counters: What became of them, under the names of `lmcache_storage.metrics`.
    """

    def __init__(self, chunks: HeldChunks, neighbours: Neighbours, counters: Counters) -> None:
        self._chunks = chunks
        self._neighbours = neighbours
        self._counters = counters

    async def run(self, wanted: Sequence[Sized], num_evicting: int, moved: Moved) -> None:
        """Move chunks, in this order. It may be cancelled; what has been sent by then has moved.

        Args:
            wanted: Names and sizes.
            num_evicting: For so many of them, from the first on, others may be given up.
            moved: Kept up to date; its `total` is set by the caller.
        """
        at = 0
        while at < len(wanted):
            end = self._end_of_window(wanted, at, num_evicting)
            await self.move(wanted[at:end], at < num_evicting, moved)
            at = end

    async def move(self, window: Sequence[Sized], may_evict: bool, moved: Moved) -> None:
        """Move a few chunks: to their homes, and what these do not take to the next choices."""
        left = list(window)
        offered: dict[ChunkKey, set[str]] = {key: set() for key, _ in window}
        for _ in range(MAX_CHOICES):
            live = self._neighbours.live()
            by_name: dict[str, list[Sized]] = {}
            nowhere: list[Sized] = []
            for key, size in left:
                others = [name for name in live if name not in offered[key]]
                if not others:
                    nowhere.append((key, size))
                    continue
                name = home(others, key.key.chunk_id())
                offered[key].add(name)
                by_name.setdefault(name, []).append((key, size))
            left = [*nowhere, *(await self._give_all(live, by_name, may_evict, moved)).refused]
        self._count(moved, "failed", len(left))

    async def move_home(self, window: Sequence[Sized], moved: Moved) -> list[ChunkKey]:
        """Move a few chunks to their homes and nowhere else, where these have room; those that
        are there now.
        """
        sizes = dict(window)
        live = self._neighbours.live()
        by_name = {
            name: [(key, sizes[key]) for key in part]
            for name, part in self._by_home(list(sizes)).items()
            if name in live
        }
        return (await self._give_all(live, by_name, False, moved)).settled

    async def still_home(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of some chunks that have moved home which have not been lost there since, and
        will not be by that server's end.
        """
        live = self._neighbours.live()
        asked = [
            self._still_there(live[name], part)
            for name, part in self._by_home(keys).items()
            if name in live
        ]
        return [key for there in await asyncio.gather(*asked) for key in there]

    def _by_home(self, keys: Sequence[ChunkKey]) -> dict[str, list[ChunkKey]]:
        known = list(self._neighbours.known())
        by_name: dict[str, list[ChunkKey]] = {}
        for key in keys if known else ():
            by_name.setdefault(home(known, key.key.chunk_id()), []).append(key)
        return by_name

    async def _still_there(self, member: Member, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        try:
            return await self._neighbours.still_there(member, keys, SEND_TIMEOUT_S)
        except (UnavailableError, AuthenticationError, ProtocolError) as exc:
            logger.warning(
                "%s does not say whether it has its chunks, which stay here: %s", member.name, exc
            )
            member.failed()
            return []

    async def _give_all(
        self,
        live: Mapping[str, Member],
        by_name: Mapping[str, Sequence[Sized]],
        may_evict: bool,
        moved: Moved,
    ) -> Outcome:
        outcomes = await asyncio.gather(
            *(self._give(live[name], part, may_evict, moved) for name, part in by_name.items())
        )
        return Outcome(
            [key for outcome in outcomes for key in outcome.settled],
            [chunk for outcome in outcomes for chunk in outcome.refused],
        )

    async def _give(
        self, member: Member, part: Sequence[Sized], may_evict: bool, moved: Moved
    ) -> Outcome:
        """Give one server its part, batch by batch."""
        outcome = Outcome()
        sizes = dict(part)
        keys = list(sizes)
        try:
            missing = await self._neighbours.missing_there(member, keys, SEND_TIMEOUT_S)
            there = sizes.keys() - set(missing)
            self._count(moved, "already_elsewhere", len(there))
            outcome.settled += there
            keys = missing
            while keys:
                batch = _batch(keys, sizes)
                await self._send(member, batch, may_evict, moved, outcome, sizes)
                keys = keys[len(batch) :]
        except (UnavailableError, AuthenticationError, ProtocolError) as exc:
            logger.warning("%s takes no chunks: %s", member.name, exc)
            member.failed()
            outcome.refused += [(key, sizes[key]) for key in keys]
        else:
            member.answered()
        return outcome

    async def _send(
        self,
        member: Member,
        batch: Sequence[ChunkKey],
        may_evict: bool,
        moved: Moved,
        outcome: Outcome,
        sizes: Mapping[ChunkKey, int],
    ) -> None:
        chunks = await self._chunks.read(batch)
        try:
            taken = (
                await self._neighbours.send(member, chunks, may_evict, SEND_TIMEOUT_S)
                if chunks
                else {}
            )
        finally:
            for chunk in chunks:
                chunk.release()
        self._count(moved, "failed", len(batch) - len(chunks))  # gone meanwhile, or not readable
        for key, is_taken in taken.items():
            if is_taken:
                outcome.settled.append(key)
                self._count(moved, "handed_over", 1)
                self._counters.add(metrics.HANDED_OVER_BYTES_TOTAL, sizes[key])
            else:
                outcome.refused.append((key, sizes[key]))

    def _count(self, moved: Moved, outcome: str, num_chunks: int) -> None:
        setattr(moved, outcome, getattr(moved, outcome) + num_chunks)
        self._counters.add(metrics.MOVED_CHUNKS_TOTAL, num_chunks, outcome)

    @staticmethod
    def _end_of_window(wanted: Sequence[Sized], begin: int, num_evicting: int) -> int:
        """Where a window ends that begins there: not across the border between what may evict
        and what may not.
        """
        limit = min(
            len(wanted), begin + WINDOW_CHUNKS, *([num_evicting] if begin < num_evicting else [])
        )
        num_bytes, end = 0, begin
        while end < limit and (end == begin or num_bytes + wanted[end][1] <= WINDOW_BYTES):
            num_bytes += wanted[end][1]
            end += 1
        return end


def _batch(keys: Sequence[ChunkKey], sizes: Mapping[ChunkKey, int]) -> list[ChunkKey]:
    num_bytes = 0
    batch: list[ChunkKey] = []
    for key in keys[:BATCH_CHUNKS]:
        num_bytes += sizes[key]
        if batch and num_bytes > BATCH_BYTES:
            break
        batch.append(key)
    return batch
