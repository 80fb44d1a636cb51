"""What the route that explains chunks answers."""

from __future__ import annotations

from itertools import takewhile

from lmcache_core.sidecar.messages import Describe

from lmcache_sidecar.admin import explain_schemas as schemas
from lmcache_sidecar.descriptions import Namer, namers
from lmcache_sidecar.parts import SidecarParts

MAX_EXPLANATIONS = 4


async def explain_all(
    parts: SidecarParts, request: schemas.ExplainRequest
) -> schemas.ExplainAnswer:
    """Explain the chunks as the engines name them that connected last.

    Raises:
        ConfigError: They have too many keys, as every engine names them.
        ConflictError: No engine has said how it names KV.
    """
    known = parts.descriptions.of(request.model)
    if request.token_ids is None:  # a hash holds the identity already
        known = list(
            {
                (one.fmt, one.model_name, one.world_size, one.groups): one
                for one in reversed(known)
            }.values()
        )[::-1]
    able = namers(parts.settings.tenant, known, lambda namer: _check(namer, request))
    explained = [
        await _explain(parts, request, one, namer) for one, namer in able[:MAX_EXPLANATIONS]
    ]
    return schemas.ExplainAnswer(
        explanations=explained, num_not_explained=len(known) - len(explained)
    )


def _check(namer: Namer, request: schemas.ExplainRequest) -> None:
    if request.token_ids is None:
        namer.check_chunks(len(request.chunk_hashes or ()))
    else:
        namer.check_tokens(len(request.token_ids))


async def _explain(
    parts: SidecarParts, request: schemas.ExplainRequest, known: Describe, namer: Namer
) -> schemas.Explanation:
    chunks = (
        namer.of_hashes(request.chunk_hashes or ())
        if request.token_ids is None
        else namer.of_tokens(request.token_ids)
    )
    keys = [key for chunk in chunks for key in chunk.keys]
    states = iter(zip(keys, await parts.explainer.states(keys), strict=True))
    views = []
    for chunk in chunks:
        of_chunk = [
            schemas.StateView(
                rank=key.key.worker_id,
                group=key.key.group,
                places=[schemas.PlaceView.model_validate(place) for place in state.places],
                missing=state.missing,
                is_pinned=key in parts.pins,
            )
            for _, (key, state) in zip(chunk.keys, states, strict=False)
        ]
        is_complete = all(state.missing is None for state in of_chunk)
        views.append(
            schemas.ChunkView(
                chunk_hash=chunk.chunk_hash,
                start=chunk.start,
                end=chunk.end,
                is_complete=is_complete,
                states=of_chunk,
            )
        )
    return schemas.Explanation(
        fmt=known.fmt,
        model_name=known.model_name,
        world_size=known.world_size,
        chunk_size=known.chunk_size,
        groups=list(known.groups),
        num_prefix=len(list(takewhile(lambda view: view.is_complete, views))),
        chunks=views,
    )
