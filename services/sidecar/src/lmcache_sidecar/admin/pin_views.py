"""What the routes that pin chunks answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.pin_board import PinBoard

from lmcache_sidecar.admin import pin_schemas as schemas
from lmcache_sidecar.descriptions import NamedChunk


def unpinned(
    chunks: Sequence[Sequence[NamedChunk]], reasons: Mapping[ChunkKey, str]
) -> list[schemas.Unpinned]:
    """What is not pinned, and why.

    A hash belongs to one model: what is missing under the names of others is not told.

    Args:
        chunks: The same chunks, as each description names them.
        reasons: For each key that is not pinned.
    """
    told: list[ChunkKey] = []
    for alike in zip(*chunks, strict=True):
        right = next(
            (chunk for chunk in alike if any(key not in reasons for key in chunk.keys)), alike[0]
        )
        told += [key for key in right.keys if key in reasons]
    return [
        schemas.Unpinned(
            chunk_hash=key.key.chunk_hash,
            rank=key.key.worker_id,
            group=key.key.group,
            reason=reasons[key],
        )
        for key in dict.fromkeys(told)
    ]


def pins_of(board: PinBoard) -> schemas.Pins:
    """Everything that is pinned."""
    return schemas.Pins(
        pins=[
            schemas.PinView(
                chunk_hash=pinned.key.key.chunk_hash,
                model_name=pinned.key.key.model_name,
                rank=pinned.key.key.worker_id,
                group=pinned.key.key.group,
                num_bytes=pinned.num_bytes,
                expires_in_s=round(pinned.expires_in_s, 3),
            )
            for pinned in board.pins()
        ],
        pinned_bytes=board.num_bytes,
        max_pinned_bytes=board.max_bytes,
    )
