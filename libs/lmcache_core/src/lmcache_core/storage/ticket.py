"""What one ticket asked, what is known of its chunks, and what is held for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType

from lmcache_core.keys import ChunkChain, ChunkKey
from lmcache_core.record import Chunk, Result, Staged, StagedFrom
from lmcache_core.storage.peer import PEER_TIER
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging_room import StagingRoom
from lmcache_core.storage.turns import Steps

_CODES = MappingProxyType(
    {
        "Hot": StagedFrom.HOT,
        "LocalDiskBackend": StagedFrom.DISK,
        PEER_TIER: StagedFrom.PEER,
        "RemoteBackend": StagedFrom.REMOTE,
    }
)


class StagedChain:
    """One chain of a ticket, and what is known of its chunks."""

    def __init__(self, tenant: str, chain: ChunkChain) -> None:
        self.num_ranks = chain.world_size
        self.tiers = bytearray(chain.num_chunks)
        self._tenant = tenant
        self._chain = chain

    def names_of(self, numbers: Sequence[int]) -> list[ChunkKey]:
        """The names of these chunks, in ascending order, those of one chunk together."""
        start, end = numbers[0], numbers[-1] + 1
        names = [
            ChunkKey(self._tenant, key) for key in self._chain.part(start, end).keys_by_chunk()
        ]
        if len(numbers) == end - start:
            return names
        num_ranks = self.num_ranks
        return [
            name
            for i in numbers
            for name in names[(i - start) * num_ranks : (i - start + 1) * num_ranks]
        ]

    def blocks(self, numbers: Sequence[int], num_keys: int) -> Iterator[Sequence[int]]:
        """These chunks, in pieces of about so many keys."""
        step = max(1, num_keys // self.num_ranks)
        return (numbers[at : at + step] for at in range(0, len(numbers), step))


class Ticket:
    """What was asked, and what is held for it."""

    def __init__(self, tenant: str, chains: Sequence[ChunkChain], is_prefix: bool) -> None:
        self.asked = (tuple(chains), is_prefix)
        self.is_prefix = is_prefix
        self.chains = [StagedChain(tenant, chain) for chain in chains]
        self.held: list[Chunk] = []
        self.is_ready = True
        self.is_over = False
        self.last_word = 0.0

    def staged(self) -> Staged:
        """What there is to tell of it."""
        return Staged(self.is_ready, tuple(bytes(chain.tiers) for chain in self.chains))


def ending(ticket: Ticket, stack: TierStack, room: StagingRoom, block: int) -> Steps[None]:
    """Give back what a ticket holds that is known no more, so many chunks at a time; closed, all
    of the rest.
    """
    ticket.is_over = True
    try:
        while len(ticket.held) > block:
            _give_back(ticket, stack, room, block)
            yield
    finally:
        _give_back(ticket, stack, room, len(ticket.held))


def _give_back(ticket: Ticket, stack: TierStack, room: StagingRoom, num_chunks: int) -> None:
    given = ticket.held[:num_chunks]
    del ticket.held[:num_chunks]
    unheld = room.give(given)
    if not stack.keeps_hot:
        stack.hot.remove_many([chunk.key for chunk in unheld])
    for chunk in given:
        chunk.release()


def whole(found: Sequence[object | None], num_ranks: int, is_prefix: bool) -> Sequence[int]:
    """Numbers of the chunks that were found for all ranks; with `is_prefix` only those in front
    of the first that was not.
    """
    if is_prefix:
        num_found = next((i for i, what in enumerate(found) if what is None), len(found))
        return range(num_found // num_ranks)
    return [
        i
        for i in range(len(found) // num_ranks)
        if None not in found[i * num_ranks : (i + 1) * num_ranks]
    ]


def code_of(result: Result) -> int:
    """Where a rank's chunk came from; what has come by another way meanwhile is hot."""
    return (
        _CODES.get(result.tier, StagedFrom.OTHER) if isinstance(result, Chunk) else StagedFrom.HOT
    )
