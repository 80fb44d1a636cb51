"""Moves chunks to their homes among other servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.remote.members import Member
from lmcache_core.storage.remote.rendezvous import home
from lmcache_core.telemetry import Counters
from lmcache_node.drain import ChunkHandover, DrainProgress, MoveProgress
from lmcache_node.local_chunks import LocalChunks
from typing_extensions import override

from lmcache_storage import metrics
from lmcache_storage.handover.servers import OtherServers

logger = logging.getLogger(__name__)

WINDOW_CHUNKS = 128
WINDOW_BYTES = 256 << 20
"""Bound on the bytes being sent to all servers together; at least one chunk is sent."""
BATCH_CHUNKS = 16
BATCH_BYTES = 32 << 20
"""Bound on the bytes being sent to one server; at least one chunk is sent."""
MAX_CHOICES = 3
"""Servers that a chunk is offered to, one after the other."""

EVICTING_SHARE = 0.5
"""Share of the bytes of a server that shuts down, the hottest, for which receivers may evict
others. The rest moves only where there is room.
"""

Sized = tuple[ChunkKey, int]


@dataclass(slots=True)
class BatchOutcome:
    """The result of a batch: chunks that have arrived, and chunks that were refused."""

    settled: list[ChunkKey] = field(default_factory=list)
    refused: list[Sized] = field(default_factory=list)


class Mover:
    """Sends chunks in windows, to the servers of a window in parallel.

    Args:
        counters: Counters of results, under the names of `lmcache_storage.metrics`.
    """

    def __init__(self, chunks: LocalChunks, servers: OtherServers, counters: Counters) -> None:
        self._chunks = chunks
        self._servers = servers
        self._counters = counters

    async def run(self, wanted: Sequence[Sized], num_evicting: int, moved: MoveProgress) -> None:
        """Move chunks, in this order. If cancelled, chunks sent by then have moved.

        Args:
            num_evicting: Number of chunks, from the first, for which others may be evicted.
            moved: Updated along the way; its `total` is set by the caller.
        """
        at = 0
        while at < len(wanted):
            end = self._end_of_window(wanted, at, num_evicting)
            await self.move(wanted[at:end], at < num_evicting, moved)
            at = end

    async def move(self, window: Sequence[Sized], may_evict: bool, moved: MoveProgress) -> None:
        """Move a few chunks to their homes, and chunks that these refuse to the next choices."""
        left = list(window)
        offered: dict[ChunkKey, set[str]] = {key: set() for key, _ in window}
        for _ in range(MAX_CHOICES):
            live = self._servers.live()
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

    async def move_home(self, window: Sequence[Sized], moved: MoveProgress) -> list[ChunkKey]:
        """Move a few chunks to their homes if these have room, and nowhere else.

        Returns:
            The chunks that are there now.
        """
        sizes = dict(window)
        live = self._servers.live()
        by_name = {
            name: [(key, sizes[key]) for key in part]
            for name, part in self._by_home(list(sizes)).items()
            if name in live
        }
        return (await self._give_all(live, by_name, False, moved)).settled

    async def still_home(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return those of the moved chunks that their home still holds and keeps."""
        live = self._servers.live()
        asked = [
            self._still_there(live[name], part)
            for name, part in self._by_home(keys).items()
            if name in live
        ]
        return [key for there in await asyncio.gather(*asked) for key in there]

    def _by_home(self, keys: Sequence[ChunkKey]) -> dict[str, list[ChunkKey]]:
        known = list(self._servers.known())
        by_name: dict[str, list[ChunkKey]] = {}
        for key in keys if known else ():
            by_name.setdefault(home(known, key.key.chunk_id()), []).append(key)
        return by_name

    async def _still_there(self, member: Member, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        try:
            held = await self._servers.held_there(member, keys)
        except (UnavailableError, AuthenticationError, ProtocolError) as exc:
            logger.warning(
                "handover not confirmed, keeping the chunks: server=%s error=%s", member.name, exc
            )
            member.failed()
            return []
        return [key for key in keys if held[key]]

    async def _give_all(
        self,
        live: Mapping[str, Member],
        by_name: Mapping[str, Sequence[Sized]],
        may_evict: bool,
        moved: MoveProgress,
    ) -> BatchOutcome:
        outcomes = await asyncio.gather(
            *(self._give(live[name], part, may_evict, moved) for name, part in by_name.items())
        )
        return BatchOutcome(
            [key for outcome in outcomes for key in outcome.settled],
            [chunk for outcome in outcomes for chunk in outcome.refused],
        )

    async def _give(
        self, member: Member, part: Sequence[Sized], may_evict: bool, moved: MoveProgress
    ) -> BatchOutcome:
        """Send one server its part, batch by batch."""
        outcome = BatchOutcome()
        sizes = dict(part)
        keys = list(sizes)
        try:
            held = await self._servers.held_there(member, keys)
            outcome.settled += [key for key in keys if held[key]]
            self._count(moved, "already_elsewhere", len(outcome.settled))
            keys = [key for key in keys if not held[key]]
            while keys:
                batch = _batch(keys, sizes)
                await self._send(member, batch, may_evict, moved, outcome, sizes)
                keys = keys[len(batch) :]
        except (UnavailableError, AuthenticationError, ProtocolError) as exc:
            logger.warning("chunks not taken: server=%s error=%s", member.name, exc)
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
        moved: MoveProgress,
        outcome: BatchOutcome,
        sizes: Mapping[ChunkKey, int],
    ) -> None:
        results = await self._chunks.read(batch)
        chunks = [result for result in results if isinstance(result, Chunk)]
        try:
            taken = await self._servers.send(member, chunks, may_evict) if chunks else {}
        finally:
            for chunk in chunks:
                chunk.release()
        self._count(moved, "failed", len(batch) - len(chunks))  # gone by now, or unreadable
        for key, is_taken in taken.items():
            if is_taken:
                outcome.settled.append(key)
                self._count(moved, "handed_over", 1)
                self._counters.add(metrics.HANDED_OVER_BYTES_TOTAL, sizes[key])
            else:
                outcome.refused.append((key, sizes[key]))

    def _count(self, moved: MoveProgress, outcome: str, num_chunks: int) -> None:
        setattr(moved, outcome, getattr(moved, outcome) + num_chunks)
        self._counters.add(metrics.MOVED_CHUNKS_TOTAL, num_chunks, outcome)

    @staticmethod
    def _end_of_window(wanted: Sequence[Sized], begin: int, num_evicting: int) -> int:
        """Return where a window that begins at `begin` ends: never across the border between chunks
        that may evict and chunks that may not.
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


def num_hottest(wanted: Sequence[Sized], share: float) -> int:
    """Return how many chunks, from the first, make up that share of all bytes."""
    enough = share * sum(size for _, size in wanted)
    num_bytes = 0
    for i, (_, size) in enumerate(wanted):
        if num_bytes >= enough:
            return i
        num_bytes += size
    return len(wanted)


class ServerHandover(ChunkHandover):
    """Hands over all chunks of a server that shuts down.

    Args:
        servers: The receivers; None if there are none.
        mover: Sends the chunks; None if there are no receivers.
    """

    writing_share = 0.25

    def __init__(
        self, chunks: LocalChunks, servers: OtherServers | None, mover: Mover | None
    ) -> None:
        self._chunks = chunks
        self._servers = servers
        self._mover = mover
        self.has_takers = mover is not None

    @override
    def count(self) -> int:
        return 0

    @override
    async def run(self, progress: DrainProgress, deadline: float) -> None:
        if self._servers is None or self._mover is None:
            return
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                await self._servers.members.refresh()
                wanted = await asyncio.to_thread(self._chunks.hottest_first)
                progress.total = len(wanted)
                num_evicting = await asyncio.to_thread(num_hottest, wanted, EVICTING_SHARE)
                await self._mover.run(wanted, num_evicting, progress)
        except TimeoutError:
            if not limit.expired():
                raise

    @override
    async def close(self) -> None:
        """Do nothing: the connections belong to the set of servers."""
