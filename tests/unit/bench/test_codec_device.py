"""The bench of the codec's kernels, with their references on a CPU: several chunks in a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lmcache_core.serde.chunk_codec import Profile
from lmcache_core.serde.tables import bell_curves
from lmcache_kernels.cachegen_decode import cachegen_decode_reference
from lmcache_kernels.cachegen_encode import cachegen_encode_reference
from lmcache_kernels.cachegen_quantize import cachegen_quantize_by_token_reference

from tests.bench import codec_device
from tests.bench.measure import Figure

SHAPE = (2, 2, 8, 32)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    def alphabets(levels: Sequence[int]) -> dict[int, Any]:
        return {level: bell_curves().of(level) for level in levels}

    def encode(values: Any, shape: Any, levels: Any, tables: Any, wraps: bool) -> Any:
        return cachegen_encode_reference(values, shape, levels, alphabets(levels), wraps)

    def decode(encoded: Any, scales: Any, levels: Any, shape: Any, _: Any, *rest: Any) -> Any:
        return cachegen_decode_reference(encoded, scales, levels, shape, alphabets(levels), *rest)

    monkeypatch.setattr(codec_device, "cachegen_encode", encode)
    monkeypatch.setattr(codec_device, "cachegen_decode", decode)
    monkeypatch.setattr(
        codec_device, "cachegen_quantize_by_token", cachegen_quantize_by_token_reference
    )
    monkeypatch.setattr(codec_device, "timed", lambda work: (work(0), 1.0)[1:])
    random = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=random).to(torch.bfloat16) for _ in range(8)]


def figures(chunks: list[torch.Tensor]) -> list[Figure]:
    limit = Figure("limit", sum(chunk.nbytes for chunk in chunks), (1.0,))
    return codec_device.launch_figures(Profile.STANDARD, chunks, limit, lambda: None)


def test_figures_by_chunks_in_a_launch(chunks: list[torch.Tensor]) -> None:
    names = [figure.name.rpartition(": ")[2] for figure in figures(chunks)]
    assert names == [
        f"{what}, {number} chunks a launch" for number in (1, 2, 8) for what in ("encode", "decode")
    ]


def test_chunks_that_are_mixed_up_in_a_launch_are_no_figure(
    chunks: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda some, *dim: stack(some if dim else some[::-1], *dim))
    with pytest.raises(AssertionError, match="other values from 2 chunks in a launch"):
        figures(chunks)
