"""What the sidecar says, looked at before it is believed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from lmcache_core.errors import RecordError
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkChain, ChunkKey
from lmcache_core.memory.base import MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import Chunk, MissReason, Staged, decode_head
from lmcache_core.sidecar import messages as m
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.extent import ArenaExtent

logger = logging.getLogger(__name__)


def is_inside(connection: SidecarConnection, offset: int, length: int) -> bool:
    """Whether the arena has such bytes."""
    return offset >= 0 and length >= 0 and offset + length <= connection.arena.size


def reserved_extents(
    connection: SidecarConnection, answer: m.ReserveOk, shapes: Sequence[Sequence[int]], dtype: str
) -> list[MemoryObj | None] | None:
    """Memory for tensors of these shapes, None for each that there is no room for; None when the
    answer is not about them.
    """
    sizes = [num_bytes(shape, dtype) for shape in shapes]
    fits = [
        given is None or is_inside(connection, given[1], size)
        for given, size in zip(answer.reservations, sizes, strict=False)
    ]
    if len(answer.reservations) != len(sizes) or not all(fits):
        return None
    extents: list[MemoryObj | None] = []
    for given, shape, size in zip(answer.reservations, shapes, sizes, strict=True):
        if given is None:
            extents.append(None)
            continue
        metadata = MemoryObjMetadata(tuple(shape), dtype, given[1], size, 1, MemoryFormat.KV_BLOB)
        extents.append(ArenaExtent.reserved(connection, given[0], given[1], metadata))
    return extents


def miss_reason(text: str) -> str:
    """A miss reason of the sidecar's; one that we do not know reads as `unavailable`."""
    if not text:
        return MissReason.NEVER_STORED
    return text if text in MissReason.__members__.values() else MissReason.UNAVAILABLE


def pinned_chunk(
    connection: SidecarConnection, key: CacheEngineKey, pinned: m.PinnedChunk
) -> Chunk | None:
    """The chunk of that name, still to be verified; None when what is pinned cannot be it."""
    if not is_inside(connection, pinned.offset, pinned.length):
        return None
    try:
        header, payload_bytes = decode_head(pinned.head, key)
    except RecordError as exc:
        logger.warning("the sidecar served a damaged record head: %s", exc.reason)
        return None
    if payload_bytes != pinned.length:
        return None
    memory = ArenaExtent.pinned(connection, pinned.pin, pinned.offset, pinned.length)
    return Chunk(ChunkKey(DEFAULT_TENANT, key), header, pinned.head, memory, pinned.tier)


def staged_chunks(
    answer: m.StageOk, asked: Sequence[ChunkChain], chains: Sequence[ChunkChain]
) -> Staged | None:
    """What is staged of these chains; None when the answer is not about them.

    Args:
        answer: The sidecar's.
        asked: What it was asked about: the beginnings of the chains. The rest is not there.
        chains: What is wanted.
    """
    if [len(tiers) for tiers in answer.tiers] != [chain.num_chunks for chain in asked]:
        return None
    tiers = tuple(
        tiers.ljust(chain.num_chunks, b"\0")
        for tiers, chain in zip(answer.tiers, chains, strict=True)
    )
    return Staged(answer.is_ready, tiers)


def fitted_chains(chains: Sequence[ChunkChain]) -> tuple[ChunkChain, ...]:
    """The beginnings of these chains, equally many chunks of each, as far as one message may
    name them.
    """
    num_keys = sum(chain.num_chunks * chain.world_size for chain in chains)
    if num_keys <= m.MAX_STAGE_KEYS:
        return tuple(chains)
    num_chunks = m.MAX_STAGE_KEYS // sum(chain.world_size for chain in chains)
    return tuple(chain.part(0, num_chunks) for chain in chains)


def fitted_ticket(ticket: str) -> str:
    """A name that a message may hold; serving engines take request ids of any length from their
    users.
    """
    if 0 < len(ticket) <= m.MAX_TICKET_CHARS and ticket.isascii():
        return ticket
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).hexdigest()
