"""The documented CacheGen serde keeps the contract of serdes, and is the documented algorithm."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.errors import SerdeError
from lmcache_core.serde import (
    CacheGenDeserializer,
    CacheGenSerializer,
    Deserializer,
    FastSerializer,
    Serializer,
)
from lmcache_core.serde.cachegen import CacheGenConfig, do_dequantize, torch_quant_vectorized

from tests.suites.serde_suite import SerdeSuite, payload_of, sealed_by_hand

CONFIG = LMCacheEngineConfig.from_defaults()


def metadata(fmt: str, layers: int = 12) -> LMCacheEngineMetadata:
    return LMCacheEngineMetadata("test_model", 1, 0, fmt, "bfloat16", (layers, 2, 256, 2, 32))


class CacheGenCase(SerdeSuite):
    lossless = False
    max_relative_error = 1 / 30 + 1 / 128
    fmt = "vllm"

    def make_serializer(self) -> Serializer:
        return CacheGenSerializer(CONFIG, metadata(self.fmt))

    def make_deserializer(self, dtype: torch.dtype | None) -> Deserializer:
        return CacheGenDeserializer(CONFIG, metadata(self.fmt), dtype)


class TestVllm(CacheGenCase):
    shapes = (
        (3, 2, 7, 2, 4),
        (2, 5, 1, 33),
        (2, 3, 65, 48),
        (0,),
        (),
        (5,),
        (2, 0, 3, 4),
        (4, 2, 0, 1, 1),
        (1, 1, 1, 1),
    )


class TestHuggingFace(CacheGenCase):
    fmt = "huggingface"
    shapes = ((3, 2, 2, 7, 4), (1, 2, 4, 70, 8), (3,))


def kv(layers: int, tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(layers, 2, tokens, 2, 32, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [7, 256, 300])
def test_values_are_those_of_the_documented_algorithm(dtype: torch.dtype, tokens: int) -> None:
    given = kv(12, tokens, dtype)
    found = CacheGenDeserializer(CONFIG, metadata("vllm"), None).from_bytes(
        CacheGenSerializer(CONFIG, metadata("vllm")).to_bytes(given)
    )
    config = CacheGenConfig.for_num_layers(12)
    for side, bins in enumerate((config.bins_of_keys(), config.bins_of_values())):
        groups = given[:, side].flatten(2)
        quantised, maxes = torch_quant_vectorized(torch.tensor(bins), groups)
        wanted = do_dequantize(quantised, torch.tensor(bins), maxes).to(dtype)
        assert torch.equal(found[:, side].flatten(2), wanted)


def test_what_would_not_get_smaller_is_kept_as_it_is() -> None:
    given = kv(12, 1, torch.bfloat16)
    found = CacheGenDeserializer(CONFIG, metadata("vllm"), None).from_bytes(
        CacheGenSerializer(CONFIG, metadata("vllm")).to_bytes(given)
    )
    assert torch.equal(found, given)


def test_the_axes_of_both_formats_name_the_same_kv() -> None:
    given = kv(12, 100, torch.bfloat16)
    vllm = CacheGenSerializer(CONFIG, metadata("vllm")).to_bytes(given)
    huggingface = CacheGenSerializer(CONFIG, metadata("huggingface")).to_bytes(
        given.transpose(2, 3)
    )
    reader = CacheGenDeserializer(CONFIG, metadata("vllm"), None)
    assert torch.equal(reader.from_bytes(vllm), reader.from_bytes(huggingface).transpose(2, 3))
    assert len(payload_of(vllm)) == len(payload_of(huggingface))


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 64, 100, 256])
@pytest.mark.parametrize("channels", [1, 3, 64, 1000])
def test_it_is_never_larger_than_the_tensor_and_its_head(tokens: int, channels: int) -> None:
    given = torch.randn(2, 3, tokens, channels, generator=torch.Generator().manual_seed(1)).to(
        torch.bfloat16
    )
    data = CacheGenSerializer(CONFIG, metadata("vllm")).to_bytes(given)
    assert len(data) <= given.nbytes + 128


def test_values_that_are_not_finite_are_kept() -> None:
    given = kv(3, 20, torch.bfloat16)
    given[1, 0, 3, 1, 5] = float("nan")
    given[2, 1, 4, 0, 0] = float("-inf")
    data = CacheGenSerializer(CONFIG, metadata("vllm")).to_bytes(given)
    found = CacheGenDeserializer(CONFIG, metadata("vllm"), None).from_bytes(data)
    assert torch.equal(found.view(torch.int16), given.view(torch.int16))


@pytest.mark.parametrize("level", ["cachegen:high", "cachegen:low"])
def test_a_profile_is_taken_from_the_config_and_read_by_any(level: str) -> None:
    given = kv(12, 256, torch.bfloat16)
    config = LMCacheEngineConfig.from_defaults(remote_serde=level)
    data = CacheGenSerializer(config, metadata("vllm")).to_bytes(given)
    assert len(data) < len(CacheGenSerializer(CONFIG, metadata("vllm")).to_bytes(given))
    found = CacheGenDeserializer(CONFIG, metadata("vllm"), torch.float32).from_bytes(data)
    assert (found - given.float()).abs().max() < (0.3 if level.endswith("high") else 0.6)


def test_tables_that_are_not_here_are_named() -> None:
    given = kv(3, 20, torch.bfloat16)
    data = CacheGenSerializer(CONFIG, metadata("vllm")).to_bytes(given)
    foreign = sealed_by_hand(
        payload_of(data),
        serde="cachegen",
        dtype="bfloat16",
        shape=given.shape,
        details=["vllm", "cachegen", "standard@0123456789abcdef"],
    )
    with pytest.raises(SerdeError, match="tables of profile 'standard@0123"):
        CacheGenDeserializer(CONFIG, metadata("vllm"), None).from_bytes(foreign)


@pytest.mark.parametrize(
    ("shape", "details"),
    [
        ((3, 2, 4, 1, 2), []),
        ((3, 2, 4, 1, 2), ["torch", "naive", ""]),
        ((3, 2, 4, 1, 2), ["vllm", "other", ""]),
        ((3, 2, 4, 1, 4), ["vllm", "naive", ""]),
        ((3, 2, 8), ["vllm", "naive", ""]),
        ((3, 1, 8, 1, 2), ["huggingface", "naive", ""]),
        ((1, 2, 1 << 20, 1, 64), ["vllm", "lossless", ""]),
    ],
)
def test_heads_that_say_what_cannot_be_are_refused(
    shape: tuple[int, ...], details: list[str]
) -> None:
    data = sealed_by_hand(
        bytes(96), serde="cachegen", dtype="bfloat16", shape=shape, details=details
    )
    with pytest.raises(SerdeError):
        CacheGenDeserializer(CONFIG, metadata("vllm"), None).from_bytes(data)


def test_other_serdes_bytes_are_refused() -> None:
    with pytest.raises(SerdeError):
        CacheGenDeserializer(CONFIG, metadata("vllm"), None).from_bytes(
            FastSerializer().to_bytes(torch.zeros(3))
        )


def test_bins_and_buffer() -> None:
    config = CacheGenConfig.for_num_layers(12)
    reader = CacheGenDeserializer(CONFIG, metadata("vllm"), None)
    assert reader.make_key_bins(config).tolist() == [32] * 10 + [16] * 2
    assert (
        CacheGenSerializer(CONFIG, metadata("vllm")).make_value_bins(config).tolist()
        == [32] * 2 + [16] * 10
    )
    buffer = reader.get_output_buffer(12, 64, 10)
    assert (buffer.shape, buffer.dtype) == ((10, 2 * 12 * 64), torch.uint8)
