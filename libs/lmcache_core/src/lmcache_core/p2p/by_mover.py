"""Reads a peer's chunks through the movers of both sides, where that is faster than lm://."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import LMCacheError, RecordError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.mover import MoverClient, Piece
from lmcache_core.record import (
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    decode_head,
)
from lmcache_core.wire.client import LmClient
from lmcache_core.wire.incoming import Received
from lmcache_core.wire.messages import Lent, Loan

MAX_GIVING_BACK: Final = 64
"""Beyond it, loans end when their time is up."""
NEW_SHARE: Final = 0.3
"""Weight of a new rate."""
TRIED_EVERY: Final = 16
"""One read in this many goes the slower way, which may have become the faster one."""
MAX_PEERS: Final = 256
TIME_SHARE: Final = 0.25
"""Part of a read's time after which GET takes over, before the peer as a whole is given up."""
REST_S, MAX_REST_S = 10.0, 600.0
"""How long the mover is not used for a peer after it has failed there: twice as long each time."""


@dataclass
class _Ways:
    """What is known about the two ways to a peer: bytes a second, 0 if never tried."""

    by_mover: float = 0.0
    by_lm: float = 0.0
    num_asked: int = 0
    rests_until: float = float("-inf")
    rest_s: float = REST_S

    def rest(self) -> None:
        """Leave the mover alone; reads that fail at the same time count as one."""
        now = time.monotonic()
        if now >= self.rests_until:
            self.rests_until = now + self.rest_s
            self.rest_s = min(2 * self.rest_s, MAX_REST_S)


class MoverPulls:
    """Reads through the mover, and decides for which peers.

    Args:
        tier: Name of the tier that chunks are attributed to.
    """

    def __init__(self, mover: MoverClient, tier: str) -> None:
        self._mover = mover
        self._tier = tier
        self._ways: OrderedDict[str, _Ways] = OrderedDict()
        self._tasks = TaskSupervisor("loans", MAX_GIVING_BACK)
        self._num_chunks = self._num_failed = 0

    def stats(self) -> dict[str, int]:
        """Return how often it went well, and not."""
        return {
            "mover_chunks": self._num_chunks,
            "failed_mover_reads": self._num_failed,
            "mover_starts": self._mover.num_lives,
        }

    def is_faster(self, peer: str) -> bool:
        """Return whether to read from a peer through the mover now."""
        ways = self._ways_to(peer)
        if not self._mover.blob or time.monotonic() < ways.rests_until:
            return False
        ways.num_asked += 1
        is_faster = not ways.by_mover or ways.by_mover >= ways.by_lm
        return is_faster != (ways.num_asked % TRIED_EVERY == 0)

    def note(self, peer: str, by_mover: bool, num_bytes: int, elapsed_s: float) -> None:
        """Record how long a read took."""
        if not num_bytes:
            return
        ways, rate = self._ways_to(peer), num_bytes / max(elapsed_s, 1e-6)
        if by_mover:
            ways.rest_s = REST_S
            ways.by_mover += (rate - ways.by_mover) * (NEW_SHARE if ways.by_mover else 1.0)
        else:
            ways.by_lm += (rate - ways.by_lm) * (NEW_SHARE if ways.by_lm else 1.0)

    async def get(
        self,
        peer: str,
        client: LmClient,
        keys: Sequence[ChunkKey],
        allocate: Allocate,
        ticket: str | None,
        deadline: float,
    ) -> list[Result | None]:
        """Read chunks and verify each. The caller owns the chunks returned.

        Args:
            client: Connected to a peer that lends.
            keys: No more than one batch of the peer's.
            deadline: On the loop's clock.

        Returns:
            One result per key; None for what GET must bring.

        Raises:
            LMCacheError: The peer cannot be asked.
        """
        now = asyncio.get_running_loop().time
        began = now()
        lent = await client.borrow(keys, ticket, deadline - began)
        loans = [item.id for item in lent.items if isinstance(item, Loan)]
        try:
            if not lent.mover:
                raise UnavailableError("the peer has no mover at the moment")
            results = await self._read(
                lent, keys, allocate, began + TIME_SHARE * (deadline - began)
            )
        except UnavailableError:
            self._num_failed += 1
            self._ways_to(peer).rest()
            return [None] * len(keys)
        finally:
            if loans:
                self._tasks.start("give-back", _give_back(client, loans))
        chunks = [each for each in results if isinstance(each, Chunk)]
        self._num_chunks += len(chunks)
        self.note(peer, True, sum(chunk.num_bytes for chunk in chunks), now() - began)
        return results

    async def close(self) -> None:
        """Stop giving back; what is lent is given back by the ends of the connections."""
        await self._tasks.close()

    async def _read(
        self, lent: Lent, keys: Sequence[ChunkKey], allocate: Allocate, deadline: float
    ) -> list[Result | None]:
        results: list[Result | None] = [None] * len(keys)
        wanted: dict[int, tuple[RecordHeader, bytes, Piece]] = {}
        try:
            for i, (key, item) in enumerate(zip(keys, lent.items, strict=True)):
                if not isinstance(item, Loan):
                    results[i] = _miss(item)
                    continue
                try:
                    header, num_bytes = decode_head(item.head, key.key)
                except RecordError:
                    continue  # GET tells what is wrong with it
                memory = allocate(num_bytes)
                if memory is None:
                    results[i] = Miss(MissReason.NO_MEMORY)
                elif self._mover.takes(memory):
                    wanted[i] = header, item.head, Piece(item.address, memory)
                else:
                    memory.ref_count_down()
            if wanted:
                pieces = [piece for _, _, piece in wanted.values()]
                left_s = deadline - asyncio.get_running_loop().time()
                await self._mover.read(lent.mover, pieces, left_s)
            while wanted:
                i, (header, head, piece) = wanted.popitem()
                received = Received(header, head, piece.memory)
                found = await received.verified(keys[i], self._tier)
                # Another chunk may be there after the end of a loan: GET tells.
                results[i] = found if isinstance(found, Chunk) else None
        except BaseException:
            for _, _, piece in wanted.values():
                piece.memory.ref_count_down()
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        return results

    def _ways_to(self, peer: str) -> _Ways:
        ways = self._ways[peer] = self._ways.pop(peer) if peer in self._ways else _Ways()
        if len(self._ways) > MAX_PEERS:
            self._ways.popitem(last=False)
        return ways


def _miss(reason: str) -> Miss | None:
    try:
        return Miss(MissReason(reason)) if reason else None
    except ValueError:
        return None


async def _give_back(client: LmClient, loans: Sequence[int]) -> None:
    with contextlib.suppress(LMCacheError):  # then they end with the connection
        await client.give_back(loans)
