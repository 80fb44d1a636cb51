"""What a chunk takes by its length: short chunks are where tables and scales weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.bench.codec_schemes import Scheme, keep

LENGTHS = (1, 7, 16, 64, 100, 256)


@dataclass(frozen=True)
class SizeRow:
    """One kind of KV at one length.

    Attributes:
        source: Which KV.
        num_tokens: Tokens of a chunk.
        raw_bytes: A chunk as it is.
        shares: By scheme: its size as a share of that.
    """

    source: str
    num_tokens: int
    raw_bytes: int
    shares: dict[str, float]


def size_rows(
    source: str, chunks: Sequence[torch.Tensor], schemes: Sequence[Scheme]
) -> list[SizeRow]:
    """Encode the first tokens of chunks, at each length.

    Args:
        source: What the rows call it.
        chunks: bf16 `[2, num_layers, at least 256, hidden]`; sizes are totals over them.
        schemes: What to encode with.
    """
    rows = []
    for num_tokens in LENGTHS:
        heads = [chunk[:, :, :num_tokens].contiguous() for chunk in chunks]
        raw = sum(keep(head)[1] for head in heads)
        shares = {
            scheme.name: sum(scheme.apply(head)[1] for head in heads) / raw for scheme in schemes
        }
        rows.append(SizeRow(source, num_tokens, int(raw / 8 / len(heads)), shares))
    return rows
