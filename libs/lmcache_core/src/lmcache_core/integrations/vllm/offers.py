"""How much of a request the chunk store can give, and keeps until it has been loaded."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_core.engine import ChunkStore
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.identity import FMT, KVIdentity
from lmcache_core.keys import CHUNK_HASH_BYTES, ChunkChain
from lmcache_core.record import Staged, StagedFrom

MAX_WINDOW_TRIES = 8
"""How often a shorter prefix is tried when chunks of a window are missing."""
WINDOW_TICKET = "/window"
Stage = Callable[..., Staged | None]


@dataclass(frozen=True)
class Offer:
    """What can be loaded.

    Attributes:
        num_chunks: How many chunks, from the first, are in memory for all ranks and groups, and
            stay there.
        origins: Where each of them was found, by the values of `StagedFrom`.
        is_complete: The chunks behind them were not stored when the store answered. False when it
            did not answer, or when a window shortened the offer.
    """

    num_chunks: int
    origins: bytes = b""
    is_complete: bool = False


class Offers:
    """Asks the store. Nothing here waits for a tier.

    Args:
        store: The chunk store.
        identity: What the KV is.
        groups: The cache groups.
        chunk_size: Tokens in a chunk.
    """

    def __init__(
        self, store: ChunkStore, identity: KVIdentity, groups: Sequence[CacheGroup], chunk_size: int
    ) -> None:
        self._store = store
        # another connector of this engine may ask the same store about the same requests
        self._mark = f"{secrets.token_hex(4)}:"
        self._model_name = identity.metadata.model_name
        self._num_ranks = identity.num_ranks
        self._chunk_size = chunk_size
        self._whole = [group for group in groups if group.window is None]
        self._windowed = [group for group in groups if group.window is not None]
        self._open: set[str] = set()
        self._bounds: dict[str, tuple[bytes, Offer]] = {}

    def ask(
        self,
        ticket: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        recompute_s: float | None,
        wait_s: float | None = None,
        saving_s: float = 0.0,
    ) -> tuple[Offer | None, bool]:
        """What there is now of these chunks, and whether nothing more will come. No offer while the
        store has not answered.

        Args:
            ticket: Names the request; ask again with it to hear how far a lift is.
            hashes: Names of its chunks.
            num_tokens: How many tokens of it can be loaded at most.
            recompute_s: What computing one chunk anew costs; None: not known.
            wait_s: As for `ChunkStore.stage`.
            saving_s: As for `ChunkStore.stage`.
        """
        stage = partial(
            self._store.stage, recompute_s=recompute_s, wait_s=wait_s, saving_s=saving_s
        )
        packed = b"".join(hashes)
        self._open.add(ticket)
        # The windows are asked for when it is known up to where, which is not asked again when they
        # take several calls.
        known, bound = self._bounds.pop(ticket, (b"", None))
        if bound is None or known != packed:
            bound, is_final = self._of_whole_groups(stage, ticket, packed)
            if bound is None or not is_final:
                return bound, is_final
        return (
            self._shortened_to_windows(stage, ticket, packed, bound, num_tokens)
            if self._windowed
            else (bound, True)
        )

    def give_back(self, tickets: Collection[str]) -> None:
        """What these requests were offered need not be kept any longer; those that were not
        asked for are passed over.
        """
        ours = [self._mark + ticket for ticket in tickets if ticket in self._open]
        self._open.difference_update(tickets)
        for ticket in tickets:
            self._bounds.pop(ticket, None)
        if ours:
            self._store.unstage(
                [*ours, *(ticket + WINDOW_TICKET for ticket in ours if self._windowed)]
            )

    def _of_whole_groups(
        self, stage: Stage, ticket: str, packed: bytes
    ) -> tuple[Offer | None, bool]:
        if not self._whole:
            return Offer(len(packed) // CHUNK_HASH_BYTES), True
        staged = stage(self._mark + ticket, [self._chain(group, packed) for group in self._whole])
        if staged is None:
            return Offer(0), True
        if not staged.tiers:
            return None, False
        num_chunks = min(_num_leading(tiers) for tiers in staged.tiers)
        origins = bytes(max(chunk) for chunk in zip(*staged.tiers, strict=True))[:num_chunks]
        return Offer(num_chunks, origins, is_complete=staged.is_ready), staged.is_ready

    def _shortened_to_windows(
        self, stage: Stage, ticket: str, packed: bytes, bound: Offer, num_tokens: int
    ) -> tuple[Offer | None, bool]:
        """The longest prefix whose windows are there too: a windowed group needs only the chunks
        that the next token looks at.
        """
        num_chunks, origins = bound.num_chunks, bound.origins
        for _ in range(MAX_WINDOW_TRIES):
            if num_chunks == 0:
                break
            end = min(num_chunks * self._chunk_size, num_tokens)
            firsts = [group.first_needed_token(end) // self._chunk_size for group in self._windowed]
            chains = [
                self._chain(group, packed[32 * first : 32 * num_chunks])
                for group, first in zip(self._windowed, firsts, strict=True)
            ]
            staged = stage(self._mark + ticket + WINDOW_TICKET, chains, is_prefix=False)
            if staged is None:
                return Offer(0), True
            missing = [
                first + tiers.find(StagedFrom.NOWHERE)
                for first, tiers in zip(firsts, staged.tiers, strict=False)
                if 0 in tiers
            ]
            if staged.tiers and not missing:
                is_complete = bound.is_complete and num_chunks == bound.num_chunks
                return (
                    Offer(num_chunks, origins or bytes([StagedFrom.HOT]) * num_chunks, is_complete),
                    True,
                )
            if not staged.is_ready:
                is_complete = bound.is_complete and num_chunks == bound.num_chunks
                self._bounds[ticket] = packed, Offer(num_chunks, origins, is_complete)
                return (Offer(0) if staged.tiers else None), False
            num_chunks = min(
                missing
            )  # every longer prefix up to this one has that chunk in its window, too
            origins = origins[:num_chunks]
        return Offer(0, is_complete=bound.is_complete and bound.num_chunks == 0), True

    def _chain(self, group: CacheGroup, packed: bytes) -> ChunkChain:
        return ChunkChain(FMT, self._model_name, self._num_ranks, group.name, packed)


def _num_leading(tiers: bytes) -> int:
    """How many chunks, from the first, are there."""
    first_missing = tiers.find(StagedFrom.NOWHERE)
    return len(tiers) if first_missing < 0 else first_missing
