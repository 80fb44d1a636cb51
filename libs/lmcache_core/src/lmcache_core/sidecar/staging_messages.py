"""Messages about chunks that a request is going to need: capability `stage`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lmcache_core.keys import ChunkChain
from lmcache_core.sidecar.message_fields import (
    MAX_BATCH,
    MAX_RANKS,
    Deadline,
    Message,
    RecomputeTime,
    Ticket,
)

MAX_CHAINS = 16
MAX_STAGE_KEYS = 64 << 10
"""Chunks times ranks, over all chains of one message."""


class Stage(Message, frozen=True):
    """What of these chunks is in the arena for all ranks, held for the ticket from now on; what is
    not begins to be lifted.

    Asked again with the same ticket it says how far the lift is; `chains` may then be empty. Other
    chains under the same ticket are a new question.

    Attributes:
        is_prefix: Nothing behind the first missing chunk of a chain counts, or is lifted.
        deadline_ms: Longest that a lift may take.
        recompute_us: As in `Pin`.

    Raises:
        ValueError: They are more than `MAX_STAGE_KEYS` keys, or of more than `MAX_RANKS` ranks.
    """

    ticket: Ticket
    chains: Annotated[tuple[ChunkChain, ...], Meta(max_length=MAX_CHAINS)]
    is_prefix: bool
    deadline_ms: Deadline
    recompute_us: RecomputeTime = 0

    def __post_init__(self) -> None:
        num_ranks = max((chain.world_size for chain in self.chains), default=1)
        if num_ranks > MAX_RANKS:
            raise ValueError(f"a chain of {num_ranks} ranks; the limit is {MAX_RANKS}")
        num_keys = sum(chain.num_chunks * chain.world_size for chain in self.chains)
        if num_keys > MAX_STAGE_KEYS:
            raise ValueError(f"{num_keys} keys in one Stage; the limit is {MAX_STAGE_KEYS}")


class StageOk(Message, frozen=True):
    """For each chain one byte a chunk (`StagedFrom`; 0: not there). `is_ready`: nothing more
    will come.
    """

    is_ready: bool
    tiers: Annotated[tuple[bytes, ...], Meta(max_length=MAX_CHAINS)]


class Unstage(Message, frozen=True):
    """Hold nothing for these tickets any more."""

    tickets: Annotated[tuple[Ticket, ...], Meta(max_length=MAX_BATCH)]


class UnstageOk(Message, frozen=True):
    """Done."""
