"""`/v1/admin/pin`, `/v1/admin/unpin`, `/v1/admin/pins`: chunks pinned by an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from lmcache_core.keys import ChunkKey
from lmcache_node.admin import DEFAULT_TTL_S, PinnedBytes, Ttl, UnpinAnswer, pinned_bytes
from lmcache_servicekit.auth import GuardedRoute, RoleRequired
from lmcache_servicekit.bodies import ApiModel
from lmcache_servicekit.errors import ConflictError
from lmcache_servicekit.problems import failures
from pydantic import ConfigDict, Field

from lmcache_sidecar.descriptions import NamedChunk, named_chunks
from lmcache_sidecar.sidecar import RunningSidecar

MAX_HASHES = 4096

ChunkHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ChunkHashes = Annotated[list[ChunkHash], Field(min_length=1, max_length=MAX_HASHES)]
ModelName = Annotated[str, Field(min_length=1, max_length=1024)]
OnlyModel = Annotated[
    ModelName | None,
    Field(description="Name the chunks as engines of this model do; null: of any model."),
]


class PinHashesRequest(ApiModel):
    """Chunks to pin, and for how long."""

    model_config = ConfigDict(extra="forbid")

    chunk_hashes: ChunkHashes
    """Hashes of the chunks, 64 hex digits each, of all ranks and groups of layers."""
    ttl_s: Ttl = DEFAULT_TTL_S
    model: OnlyModel = None


class UnpinnedHash(ApiModel):
    """One chunk of a rank and group that was not pinned."""

    chunk_hash: str
    """Its hash, 64 hex digits."""
    rank: int
    """The rank that its KV belongs to."""
    group: str
    """Its group of layers; `""` is the only one, or that with full attention."""
    reason: str
    """Why a read missed it, for example `never_stored`, `evicted` or `no_memory`; or `pin_bound`:
    too much is pinned already.
    """


class PinHashesAnswer(PinnedBytes):
    """The pins after a request."""

    num_pinned: int
    """Chunks of the request that are pinned now, counted for each rank and group."""
    not_pinned: list[UnpinnedHash]
    """The other ones, counted likewise; a chunk that several models might have is listed for one of
    them.
    """


class UnpinHashesRequest(ApiModel):
    """Chunks to unpin."""

    model_config = ConfigDict(extra="forbid")

    chunk_hashes: ChunkHashes | None = None
    """Hashes of the chunks, 64 hex digits each; null: all pinned chunks."""


class PinnedHash(ApiModel):
    """One pinned chunk of a rank and group."""

    chunk_hash: str
    """Its hash, 64 hex digits."""
    model_name: str
    """The model, as the engine names it."""
    rank: int
    """The rank that its KV belongs to."""
    group: str
    """Its group of layers; `""` is the only one, or that with full attention."""
    num_bytes: int
    """Shared memory that it takes, in bytes."""
    expires_in_s: float
    """Seconds until its pin ends."""


class PinnedHashes(PinnedBytes):
    """All pinned chunks."""

    pins: list[PinnedHash]
    """One for each chunk, rank and group."""


router = APIRouter(
    prefix="/v1/admin",
    tags=["pins"],
    dependencies=[Depends(RoleRequired("admin"))],
    route_class=GuardedRoute,
)


@router.post("/pin", responses=failures(409))
async def pin_chunks(sidecar: RunningSidecar, request: PinHashesRequest) -> PinHashesAnswer:
    """Pin chunks.

    Load chunks into shared memory and protect them from eviction until `ttl_s` has passed, or an
    unpin, drain or restart. The answer names those that were not pinned. 400: too many keys, which
    are chunks times ranks times groups. 409: no engine (of the model) has connected yet, or the
    sidecar drains.
    """
    if not sidecar.takes_chunks():
        raise ConflictError("this sidecar is draining and accepts no pins")
    known = sidecar.descriptions.of(request.model)
    named = named_chunks(sidecar.settings.tenant, known, request.chunk_hashes)
    chunks = [of_model for _, of_model in named]
    keys = list(
        dict.fromkeys(key for of_model in chunks for chunk in of_model for key in chunk.keys)
    )
    reasons = await sidecar.pins.pin(keys, request.ttl_s)
    return PinHashesAnswer(
        num_pinned=len(keys) - len(reasons),
        not_pinned=_unpinned(chunks, reasons),
        **pinned_bytes(sidecar.pins),
    )


@router.post("/unpin")
async def unpin_chunks(
    sidecar: RunningSidecar, request: UnpinHashesRequest | None = None
) -> UnpinAnswer:
    """Unpin chunks.

    Those that the body names; without one, all. They stay in shared memory until they are evicted.
    Chunks that are not pinned are ignored.
    """
    chunk_hashes = (
        None if request is None or request.chunk_hashes is None else frozenset(request.chunk_hashes)
    )
    return UnpinAnswer(num_unpinned=sidecar.pins.unpin_hashes(chunk_hashes))


@router.get("/pins")
async def list_pins(sidecar: RunningSidecar) -> PinnedHashes:
    """List pins.

    The pinned chunks with their remaining time, in no order.
    """
    return PinnedHashes(
        pins=[
            PinnedHash(
                chunk_hash=pinned.key.key.chunk_hash,
                model_name=pinned.key.lane.model_name,
                rank=pinned.key.lane.worker_id,
                group=pinned.key.lane.group,
                num_bytes=pinned.num_bytes,
                expires_in_s=round(pinned.expires_in_s, 3),
            )
            for pinned in sidecar.pins.pins()
        ],
        **pinned_bytes(sidecar.pins),
    )


def _unpinned(
    chunks: Sequence[Sequence[NamedChunk]], reasons: Mapping[ChunkKey, str]
) -> list[UnpinnedHash]:
    """Return the chunks that are not pinned, with reasons. A hash belongs to one model: that it is
    missing under other models' names is not reported.

    Args:
        chunks: The same chunks, as named by each description.
        reasons: Reason for each key that is not pinned.
    """
    told: list[ChunkKey] = []
    for alike in zip(*chunks, strict=True):
        right = next(
            (chunk for chunk in alike if any(key not in reasons for key in chunk.keys)), alike[0]
        )
        told += [key for key in right.keys if key in reasons]
    return [
        UnpinnedHash(
            chunk_hash=key.key.chunk_hash,
            rank=key.lane.worker_id,
            group=key.lane.group,
            reason=reasons[key],
        )
        for key in dict.fromkeys(told)
    ]
