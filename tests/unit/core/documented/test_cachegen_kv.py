"""The documented functions that encode KV into streams of channels and decode it."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.errors import ConfigError, LayoutError, SerdeError
from lmcache_core.serde.cachegen import (
    CacheGenConfig,
    CacheGenGPUBytestream,
    CacheGenGPUEncoderOutput,
    decode_function_gpu,
    encode_function,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kv_of(layers: int, tokens: int, heads: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layers * 1000 + tokens)
    drawn = torch.randn(layers, 2, tokens, heads, size, generator=generator)
    return (drawn * 4).bfloat16().to(DEVICE)


def encode(
    kv: torch.Tensor, chunk_size: int, config: CacheGenConfig | None = None
) -> CacheGenGPUEncoderOutput:
    config = config or CacheGenConfig.for_num_layers(kv.shape[0])
    return encode_function(
        kv,
        config,
        torch.tensor(config.bins_of_keys()),
        torch.tensor(config.bins_of_values()),
        chunk_size,
    )


@pytest.mark.parametrize(
    ("shape", "chunk_size"),
    [((12, 7, 3, 5), 256), ((11, 10, 2, 2), 3), ((2, 0, 1, 3), 4)],
)
def test_encoding_cuts_kv_into_chunks_of_streams(
    shape: tuple[int, int, int, int], chunk_size: int
) -> None:
    """That they come back as they were quantised: `tests/property/test_cachegen_streams.py`."""
    layers, tokens, heads, size = shape
    channels = heads * size
    made = encode(kv_of(*shape), chunk_size)
    counts = [chunk.ntokens for chunk in made.data_chunks]
    assert sum(counts) == tokens
    assert all(count == chunk_size for count in counts[:-1])
    assert (made.num_heads, made.head_size) == (heads, size)
    assert (made.cdf.dtype, made.cdf.shape) == (torch.int16, (2 * layers, channels, 33))
    for chunk in made.data_chunks:
        lengths = chunk.bytestream_lengths
        assert (lengths.dtype, lengths.shape) == (torch.int32, (2 * layers, channels))


def test_an_output_has_a_row_for_each_token() -> None:
    """Layers of the keys, then of the values."""
    kv = kv_of(3, 9, 2, 2)
    made, output = encode(kv, 4), torch.full((9, 24), 0xA5, dtype=torch.uint8, device=DEVICE)
    sides = decode_function_gpu(made.cdf, made.data_chunks, 3, 4, output)
    assert [(side.dtype, side.shape) for side in sides] == [(torch.float32, (3, 9, 4))] * 2
    rows = torch.cat(sides).permute(1, 0, 2).reshape(9, 24)
    assert torch.equal(output, rows.to(torch.uint8))


@pytest.mark.parametrize(
    ("kv", "chunk_size", "message"),
    [
        (torch.ones(2, 3, 3, 1, 4), 4, "num_heads, head_size"),
        (torch.ones(2, 2, 3, 1, 0), 4, "no channels"),
        (torch.ones(2, 2, 3, 1, 4, dtype=torch.int32), 4, "cannot be quantised"),
        (torch.ones(2, 2, 3, 1, 4), 0, "at least 1"),
        (torch.ones(3, 2, 3, 1, 4), 4, r"for_num_layers\(3\)"),
    ],
)
def test_unusable_kv_is_refused(kv: torch.Tensor, chunk_size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        encode(kv, chunk_size, CacheGenConfig.for_num_layers(2))


def test_unusable_bins_are_refused() -> None:
    config, kv = CacheGenConfig.for_num_layers(2), kv_of(2, 3, 1, 4)
    with pytest.raises(ConfigError, match="even number"):
        encode_function(kv, config, torch.tensor([32, 3]), torch.tensor([32, 32]), 4)
    with pytest.raises(LayoutError, match="one number for each layer"):
        encode_function(kv, config, torch.tensor([32, 32]), torch.tensor([32]), 4)


MADE = encode(kv_of(2, 9, 1, 3), 4)
CHUNKS = list(MADE.data_chunks)
EMPTY = CacheGenGPUBytestream(CHUNKS[0].bytestream, CHUNKS[0].bytestream_lengths, -1)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 3},
        {"layers_in_key": 1},
        {"output": torch.zeros(8, 12, dtype=torch.uint8)},
        {"output": torch.zeros(9, 24, dtype=torch.uint8)[:, ::2]},
        {"output": torch.zeros(9, 12)},
        {"data_chunks": CHUNKS[:-1]},
        {"data_chunks": [*CHUNKS, EMPTY]},
    ],
)
def test_decoding_checks_what_it_is_given(change) -> None:
    given = {
        "cdf": MADE.cdf,
        "data_chunks": CHUNKS,
        "layers_in_key": 2,
        "chunk_size": 4,
        "output": torch.zeros(9, 12, dtype=torch.uint8),
    }
    with pytest.raises((LayoutError, SerdeError), match=r"chunk|give"):
        decode_function_gpu(**(given | change))
