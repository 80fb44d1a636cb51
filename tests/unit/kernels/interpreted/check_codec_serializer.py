"""The documented serializer gives the same bytes wherever the tensor lies."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.serde import CacheGenDeserializer, CacheGenSerializer, chunk_codec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def metadata(fmt: str) -> LMCacheEngineMetadata:
    return LMCacheEngineMetadata("test_model", 1, 0, fmt, "bfloat16", (2, 2, 256, 2, 24))


@pytest.mark.parametrize(
    ("name", "fmt", "shape"),
    [
        ("naive", "vllm", (1, 2, 4, 2, 24)),
        ("cachegen:high", "vllm", (1, 2, 5, 1, 48)),
        ("naive", "huggingface", (1, 2, 2, 4, 24)),
    ],
)
def test_bytes_do_not_depend_on_where_the_tensor_lies(
    name: str, fmt: str, shape: tuple[int, ...], monkeypatch
) -> None:
    monkeypatch.setattr(chunk_codec, "SHORT_TOKENS", 5)
    config = LMCacheEngineConfig.from_defaults(remote_serde=name)
    writer = CacheGenSerializer(config, metadata(fmt))
    given = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    wanted = writer.to_bytes(given)
    assert writer.encode_on_device(given.to(DEVICE)) == wanted
    assert CacheGenDeserializer(config, metadata(fmt), None).from_bytes(wanted).shape == given.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_what_cannot_be_quantised_is_left_to_the_host(value: float) -> None:
    given = torch.randn(1, 2, 4, 2, 24).to(torch.bfloat16)
    given[0, 0, 3, 1, 2] = value
    writer = CacheGenSerializer(LMCacheEngineConfig.from_defaults(), metadata("vllm"))
    assert writer.encode_on_device(given.to(DEVICE)) is None
    assert writer.encode_on_device(torch.zeros(3, device=DEVICE)) is None
