"""Explain where chunks are and why they are missing, and what recent requests found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from itertools import islice, takewhile
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Query
from lmcache_core.addresses import is_loopback
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import MAX_TOKEN_ID, ChunkKey
from lmcache_core.names import DISK_TIER, MEMORY_TIER, PEER_TIER, STORAGE_TIER
from lmcache_core.record import Miss, MissReason, StagedFrom
from lmcache_core.telemetry.request_context import MAX_REQUEST_ID_CHARS
from lmcache_core.wire.messages import Describe
from lmcache_servicekit.auth import GuardedRoute, RoleRequired
from lmcache_servicekit.bodies import ApiModel
from lmcache_servicekit.errors import PermissionDeniedError
from lmcache_servicekit.problems import failures
from pydantic import ConfigDict, Field, model_validator

from lmcache_sidecar.admin.pins import ChunkHashes, OnlyModel
from lmcache_sidecar.admin.status import Description
from lmcache_sidecar.descriptions import NamedChunk, named_chunks
from lmcache_sidecar.holders import Holders
from lmcache_sidecar.recent_lookups import RecentLookup
from lmcache_sidecar.sidecar import RunningSidecar, SidecarNode

MAX_QUESTIONS = 64
"""Questions to lookup for the chunks of one rank and group."""
TIER_OF = {
    StagedFrom.HOT: MEMORY_TIER,
    StagedFrom.DISK: DISK_TIER,
    StagedFrom.PEER: PEER_TIER,
    StagedFrom.REMOTE: STORAGE_TIER,
    StagedFrom.OTHER: "other",
}
QUARANTINED = "quarantined"
PROMISED = "promised"
UNKNOWN = "unknown"

T = TypeVar("T")
PlaceState = Literal["present", "refused", "unknown"]
MAX_EXPLAINED_TOKENS = 131_072
MAX_EXPLANATIONS = 4

TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
    Field(min_length=1, max_length=MAX_EXPLAINED_TOKENS),
]


class ExplainRequest(ApiModel):
    """Chunks, or the token ids of a prompt of text."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    chunk_hashes: ChunkHashes | None = None
    """Hashes of the chunks, 64 hex digits each; null: `token_ids` are given."""
    token_ids: TokenIds | None = None
    """Token ids of a prompt, which is cut into chunks as the engines do; null: `chunk_hashes` are
    given.
    """
    model: OnlyModel = None

    @model_validator(mode="after")
    def _check_one(self) -> ExplainRequest:
        if (self.chunk_hashes is None) == (self.token_ids is None):
            raise ValueError("give either chunk_hashes or token_ids")
        return self


class PlaceView(ApiModel):
    """A tier that has a chunk, or may have it."""

    tier: str
    """`memory` (shared memory), `disk`, `peers` or `storage`."""
    state: PlaceState
    """`present`; `refused`: present, but its encoding is not served; `unknown`: the tier did not
    answer in time.
    """
    num_bytes: int | None = None
    """Size of its record there, in bytes; null: unknown, as at peers and in the remote tier."""
    age_s: float | None = None
    """Seconds since it was stored there; null: unknown."""
    num_holders: int | None = None
    """References on it: readers, pins, writes to slower tiers; null outside of shared memory."""
    lossy: bool | None = None
    """Whether it was encoded with loss; null: unknown until it is read."""
    peers: list[str] = Field(default_factory=list)
    """Ids of the instances that hold it; empty for other tiers."""


class StateView(ApiModel):
    """The state of a chunk of one rank and group."""

    rank: int
    """The rank that its KV belongs to."""
    group: str
    """Its group of layers; `""` is the only one, or that with full attention."""
    places: list[PlaceView]
    """Fastest tier first; tiers without the chunk are omitted."""
    missing: str | None
    """Why no tier is known to have it, for example `never_stored`, `evicted`, `quarantined`,
    `promised` (an engine is storing it) or `unknown` (a tier did not answer); null: one has it.
    """
    is_pinned: bool
    """Whether an operator pinned it (`POST /v1/admin/pin`)."""


class ChunkView(ApiModel):
    """One chunk of all ranks and groups."""

    chunk_hash: str
    """Its hash, 64 hex digits."""
    start: int | None
    """Position of its first token in the prompt; null if hashes were given."""
    end: int | None
    """Position after its last token; null if hashes were given."""
    is_complete: bool
    """Whether each rank and group of it exists in some tier."""
    states: list[StateView]
    """One for each rank and group."""


class Explanation(Description):
    """The chunks as named by the engines of one model."""

    num_prefix: int
    """Number of complete chunks from the first."""
    chunks: list[ChunkView]
    """In the order of the prompt or of the request."""


class ExplainAnswer(ApiModel):
    """Where the chunks are, for each way in which engines have named KV recently."""

    explanations: list[Explanation]
    """The latest way first; 4 at most."""
    num_not_explained: int
    """Further explanations that were omitted; name a model to see them."""


class LookupView(ApiModel):
    """What an engine asked for before the prefill of one request."""

    request_id: str
    """Contains the engine's id of the request."""
    model_name: str
    """The model, as the engine names it."""
    age_s: float
    """Seconds since the engine first asked."""
    num_chunks: int
    """Chunks of the prompt."""
    num_found: int
    """Chunks of the prefix that all groups of layers have in some tier."""
    found: dict[str, int]
    """The same by tier; a chunk counts for the farthest tier of its groups."""
    num_at_once: int
    """The same, when the engine first asked: what came later was read, or still being stored."""
    is_final: bool
    """Whether nothing was being read from slower tiers when the engine last asked."""
    settled_s: float | None
    """Seconds from the first question until that was so; null: something is being read."""
    source: str | None
    """Where chunks that another engine had just computed were expected from: an instance's id or
    host, or `""` for any; null: none were expected.
    """
    missing: str | None
    """Why shared memory did not have the first missing chunk; null: none was missing."""
    chunk_hashes: list[str]
    """Hashes of the first 512 chunks, 64 hex digits each."""


class RememberedLookup(ApiModel):
    """The latest lookup of the requests that match."""

    lookup: LookupView | None
    """null: none is remembered."""


Found = Sequence[PlaceView | MissReason]
"""A tier's answer for each chunk."""

router = APIRouter(
    prefix="/v1/admin",
    tags=["explain"],
    dependencies=[Depends(RoleRequired("admin"))],
    route_class=GuardedRoute,
)


@router.post(
    "/explain",
    responses=failures(409),
)
async def explain_chunks(sidecar: RunningSidecar, request: ExplainRequest) -> ExplainAnswer:
    """Explain where chunks are, or why they are missing.

    Asks every tier, without counting as a read. Token ids are never logged. 400: too many keys,
    which are chunks times ranks times groups. 403 unless the sidecar listens on loopback only. 409:
    no engine (of the model) has connected yet.
    """
    _check_loopback(sidecar)
    known = sidecar.descriptions.of(request.model)
    if request.token_ids is None:  # a hash already contains the identity
        known = list(
            {
                (one.fmt, one.model_name, one.world_size, one.groups): one
                for one in reversed(known)
            }.values()
        )[::-1]
    named = named_chunks(
        sidecar.settings.tenant, known, request.chunk_hashes or (), request.token_ids or ()
    )
    explained = [
        await _explain(sidecar, one, chunks) for one, chunks in islice(named, MAX_EXPLANATIONS)
    ]
    return ExplainAnswer(explanations=explained, num_not_explained=len(known) - len(explained))


@router.get("/lookups")
async def latest_lookup(
    sidecar: RunningSidecar,
    request_id: Annotated[
        str,
        Query(
            min_length=1,
            max_length=MAX_REQUEST_ID_CHARS,
            description="The engine's id of the request, or a part of it.",
        ),
    ],
) -> RememberedLookup:
    """Find the latest lookup of a request.

    The last 1,000 of the last hour are kept in memory: hashes and counts, no tokens. 403 unless
    the sidecar listens on loopback only.
    """
    _check_loopback(sidecar)
    found = sidecar.lookups.latest(request_id)
    return RememberedLookup(lookup=None if found is None else _lookup_view(found))


def _check_loopback(sidecar: SidecarNode) -> None:
    """Refuse calls that may come from outside of the pod.

    Raises:
        PermissionDeniedError: The sidecar's REST API does not listen on loopback only.
    """
    if not is_loopback(sidecar.settings.host):
        raise PermissionDeniedError(
            f"this call is served on loopback only; this sidecar has host={sidecar.settings.host!r}"
        )


def _lookup_view(one: RecentLookup) -> LookupView:
    return LookupView(
        request_id=one.request_id,
        model_name=one.model_name,
        age_s=max(0.0, time.time() - one.asked_at),
        num_chunks=one.num_chunks,
        num_found=one.found.total(),
        found={TIER_OF[origin]: num for origin, num in sorted(one.found.items())},
        num_at_once=one.num_at_once,
        is_final=one.is_final,
        settled_s=one.settled_s,
        source=one.source,
        missing=one.missing or None,
        chunk_hashes=one.chunk_hashes,
    )


async def _explain(
    sidecar: SidecarNode, known: Describe, chunks: Sequence[NamedChunk]
) -> Explanation:
    keys = [key for chunk in chunks for key in chunk.keys]
    # Chunks of one prompt are in its order.
    tiers = await asyncio.gather(
        _in_memory(sidecar, keys),
        _on_disk(sidecar, keys),
        _at_peers(sidecar, keys),
        _in_remote(sidecar, keys),
    )
    states = iter(zip(keys, zip(*filter(None, tiers), strict=True), strict=True))
    views = []
    for chunk in chunks:
        of_chunk = [
            _state(sidecar, key, found) for _, (key, found) in zip(chunk.keys, states, strict=False)
        ]
        is_complete = all(state.missing is None for state in of_chunk)
        views.append(
            ChunkView(
                chunk_hash=chunk.chunk_hash,
                start=chunk.start,
                end=chunk.end,
                is_complete=is_complete,
                states=of_chunk,
            )
        )
    return Explanation(
        fmt=known.fmt,
        model_name=known.model_name,
        world_size=known.world_size,
        chunk_size=known.chunk_size,
        groups=list(known.groups),
        num_prefix=len(list(takewhile(lambda view: view.is_complete, views))),
        chunks=views,
    )


async def _in_memory(sidecar: SidecarNode, keys: Sequence[ChunkKey]) -> Found:
    hot = sidecar.stack.hot
    return [
        held.reason
        if isinstance(held, Miss)
        else PlaceView(
            tier=hot.name,
            state="present",
            num_bytes=held.num_bytes,
            age_s=_age_s(held.stored_at),
            num_holders=held.num_holders,
            lossy=held.lossy,
        )
        for held in hot.peek_many(keys)
    ]


async def _on_disk(sidecar: SidecarNode, keys: Sequence[ChunkKey]) -> Found:
    disk, guard = sidecar.tiers.disk, sidecar.tiers.guarded(DISK_TIER)
    if disk is None or guard is None or guard.wrapped is None:
        return ()
    served = guard.wrapped.contains_now(keys)  # what its codec lets through
    found: list[PlaceView | MissReason] = []
    for i, entry in enumerate(disk.peek_many(keys)):
        if isinstance(entry, Miss):
            found.append(entry.reason)
            continue
        found.append(
            PlaceView(
                tier=disk.name,
                state="unknown" if served is None else "present" if served[i] else "refused",
                num_bytes=entry.record_bytes,
                age_s=_age_s(entry.stored_at),
                lossy=entry.lossy,
            )
        )
    return found


async def _at_peers(sidecar: SidecarNode, keys: Sequence[ChunkKey]) -> Found:
    if sidecar.holders is None:
        return ()
    found: list[PlaceView | MissReason] = [PlaceView(tier=PEER_TIER, state="unknown")] * len(keys)
    await _bounded(sidecar, _ask_lookup(sidecar.holders, keys, found))
    return found


async def _ask_lookup(
    holders: Holders, keys: Sequence[ChunkKey], found: list[PlaceView | MissReason]
) -> None:
    """Fill in what is known about peers: separately for each rank and group, because only their
    chunks in order form a prefix.
    """
    chains: dict[tuple[int, str], list[int]] = {}
    for i, key in enumerate(keys):
        chains.setdefault((key.lane.worker_id, key.lane.group), []).append(i)
    for chain in chains.values():
        answer = await holders.of([keys[i].key.chunk_id() for i in chain], MAX_QUESTIONS)
        for i, holding in zip(chain, answer, strict=True):
            if holding is not None:
                peers = list(dict.fromkeys(holder.instance for holder in holding))
                found[i] = (
                    PlaceView(tier=PEER_TIER, state="present", peers=peers)
                    if peers
                    else MissReason.NEVER_STORED
                )


async def _in_remote(sidecar: SidecarNode, keys: Sequence[ChunkKey]) -> Found:
    remote = sidecar.tiers.remote
    if remote is None:
        return ()
    present = await _bounded(sidecar, remote.batched_contains(keys))
    if present is None:
        return [PlaceView(tier=remote.name, state="unknown")] * len(keys)
    there = PlaceView(tier=remote.name, state="present")
    return [there if is_there else MissReason.NEVER_STORED for is_there in present]


async def _bounded(sidecar: SidecarNode, work: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(sidecar.settings.tier_timeout_s):
            return await work
    except (TimeoutError, UnavailableError):
        return None


def _age_s(stored_at: float | None) -> float | None:
    return None if stored_at is None else max(0.0, time.time() - stored_at)


def _state(sidecar: SidecarNode, key: ChunkKey, found: Found) -> StateView:
    places = [place for place in found if isinstance(place, PlaceView)]
    reasons = [reason for reason in found if isinstance(reason, MissReason)]
    missing = _why_missing({place.state for place in places}, reasons)
    if missing is not None and key in sidecar.stack.expected:
        missing = PROMISED
    return StateView(
        rank=key.lane.worker_id,
        group=key.lane.group,
        places=places,
        missing=missing,
        is_pinned=key in sidecar.pins,
    )


def _why_missing(states: set[PlaceState], reasons: Sequence[MissReason]) -> str | None:
    """Return the most certain reason: what is known comes before what could not be asked. None if
    the chunk is present.
    """
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
