"""KV in streams of channels comes back as it was quantised, and what cannot be encoded or
decoded is refused in words.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lmcache_core.documented.cachegen.quantization import bins_tensor
from lmcache_core.errors import ConfigError, LayoutError, SerdeError
from lmcache_core.serde.cachegen import (
    CacheGenConfig,
    CacheGenGPUBytestream,
    CacheGenGPUEncoderOutput,
    QuantizationSpec,
    decode_function_gpu,
    do_dequantize,
    encode_function,
    torch_quant_vectorized,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kv_of(
    layers: int, tokens: int, heads: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    drawn = torch.randn(
        layers,
        2,
        tokens,
        heads,
        size,
        generator=torch.Generator().manual_seed(layers * 1000 + tokens),
    )
    return (drawn * 4).to(dtype).to(DEVICE)


def encode(
    kv: torch.Tensor, chunk_size: int, config: CacheGenConfig | None = None
) -> CacheGenGPUEncoderOutput:
    config = config or CacheGenConfig.for_num_layers(kv.shape[0])
    return encode_function(
        kv,
        config,
        bins_tensor(config.bins_of_keys()),
        bins_tensor(config.bins_of_values()),
        chunk_size,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "chunk_size"),
    [
        ((1, 1, 1, 1), 1),
        ((12, 7, 3, 5), 256),
        ((2, 300, 1, 8), 256),
        ((11, 10, 2, 2), 3),
        ((2, 0, 1, 3), 4),
    ],
)
def test_kv_comes_back_as_quantised(
    dtype: torch.dtype, shape: tuple[int, int, int, int], chunk_size: int
) -> None:
    layers, tokens, heads, size = shape
    channels = heads * size
    kv = kv_of(*shape, dtype)
    config = CacheGenConfig.for_num_layers(layers)
    key_bins, value_bins = bins_tensor(config.bins_of_keys()), bins_tensor(config.bins_of_values())
    made = encode_function(kv, config, key_bins, value_bins, chunk_size)
    counts = [chunk.ntokens for chunk in made.data_chunks]
    assert sum(counts) == tokens
    assert all(count == chunk_size for count in counts[:-1])
    assert (made.num_heads, made.head_size) == (heads, size)
    assert (made.cdf.dtype, made.cdf.shape) == (torch.int16, (2 * layers, channels, 33))
    assert all(
        (c.bytestream_lengths.dtype, c.bytestream_lengths.shape)
        == (torch.int32, (2 * layers, channels))
        for c in made.data_chunks
    )
    read = CacheGenGPUEncoderOutput.from_bytes(made.to_bytes())
    output = torch.full((tokens, 2 * layers * channels), 0xA5, dtype=torch.uint8, device=DEVICE)
    sides = decode_function_gpu(read.cdf, read.data_chunks, layers, chunk_size, output)
    wanted = []
    for side, bins, maxes in zip(
        range(2),
        (key_bins, value_bins),
        (read.max_tensors_key, read.max_tensors_value),
        strict=True,
    ):
        quantised, direct_maxes = torch_quant_vectorized(
            bins, kv[:, side].reshape(layers, tokens, channels)
        )
        wanted.append(quantised)
        assert (sides[side].dtype, sides[side].shape) == (torch.float32, (layers, tokens, channels))
        assert torch.equal(sides[side], quantised.float())
        assert maxes.dtype == dtype
        assert torch.equal(maxes.to(DEVICE), direct_maxes)
        assert torch.equal(
            do_dequantize(sides[side], bins, maxes, dtype),
            do_dequantize(quantised, bins, direct_maxes, dtype),
        )
    by_token = torch.cat(wanted).permute(1, 0, 2).reshape(tokens, 2 * layers * channels)
    assert torch.equal(output, by_token.view(torch.uint8)), (
        "a row for each token: layers of the keys, then of the values"
    )


def test_the_table_has_the_largest_number_of_bins() -> None:
    config = CacheGenConfig(
        2, [QuantizationSpec(0, 2, 8)], [QuantizationSpec(0, 1, 4), QuantizationSpec(1, 2, 256)]
    )
    kv = kv_of(2, 20, 1, 3)
    made = encode(kv, 8, config)
    assert made.cdf.shape == (4, 3, 257)
    output = torch.empty(20, 12, dtype=torch.int8)
    _, value = decode_function_gpu(made.cdf, made.data_chunks, 2, 8, output)
    wanted, _ = torch_quant_vectorized(bins_tensor([4, 256]), kv[:, 1].reshape(2, 20, 3))
    assert torch.equal(value, wanted.view(torch.uint8).float().cpu())
    assert value.max() == 254


def test_kv_with_gaps_is_encoded_as_its_copy() -> None:
    kv = kv_of(3, 9, 2, 4).permute(0, 1, 2, 4, 3)
    assert encode(kv, 4).to_bytes() == encode(kv.contiguous(), 4).to_bytes()


@pytest.mark.parametrize(
    ("kv", "chunk_size", "message"),
    [
        (torch.ones(2, 2, 3, 4), 4, "num_heads, head_size"),
        (torch.ones(2, 3, 3, 1, 4), 4, "num_heads, head_size"),
        (torch.ones(2, 2, 3, 1, 0), 4, "no channels"),
        (torch.ones(2, 2, 3, 1, 4, dtype=torch.int32), 4, "cannot be quantised"),
        (torch.ones(2, 2, 3, 1, 4), 0, "at least 1"),
        (torch.ones(3, 2, 3, 1, 4), 4, r"for_num_layers\(3\)"),
    ],
)
def test_kv_that_cannot_be_encoded(kv: torch.Tensor, chunk_size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        encode(kv, chunk_size, CacheGenConfig.for_num_layers(2))


def test_bins_that_cannot_be_used() -> None:
    config, kv = CacheGenConfig.for_num_layers(2), kv_of(2, 3, 1, 4)
    with pytest.raises(ConfigError, match="even number"):
        encode_function(kv, config, bins_tensor([32, 3]), bins_tensor([32, 32]), 4)
    with pytest.raises(LayoutError, match="one number for each layer"):
        encode_function(kv, config, bins_tensor([32, 32]), bins_tensor([32]), 4)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 3},
        {"chunk_size": 0},
        {"layers_in_key": 1},
        {"layers_in_key": -1},
        {"output": "short"},
        {"output": "gaps"},
        {"output": "float"},
        {"data_chunks": "fewer"},
        {"data_chunks": "negative"},
    ],
)
def test_decoding_checks_what_it_is_given(change) -> None:
    made = encode(kv_of(2, 9, 1, 3), 4)
    chunks = list(made.data_chunks)
    outputs = {
        "short": torch.zeros(8, 12, dtype=torch.uint8),
        "gaps": torch.zeros(9, 24, dtype=torch.uint8)[:, ::2],
        "float": torch.zeros(9, 12),
        "right": torch.zeros(9, 12, dtype=torch.uint8),
    }
    lists = {
        "fewer": chunks[:-1],
        "negative": [
            *chunks,
            CacheGenGPUBytestream(chunks[0].bytestream, chunks[0].bytestream_lengths, -1),
        ],
        "right": chunks,
    }
    arguments = {
        "layers_in_key": 2,
        "chunk_size": 4,
        "output": "right",
        "data_chunks": "right",
    } | change
    with pytest.raises((LayoutError, SerdeError), match=r"chunk|give"):
        decode_function_gpu(
            made.cdf,
            lists[arguments["data_chunks"]],
            arguments["layers_in_key"],
            arguments["chunk_size"],
            outputs[arguments["output"]],
        )


def test_without_numba_the_message_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['numba'] = None; import torch\n"
        "from lmcache_core.serde.cachegen import CacheGenConfig, encode_function\n"
        "c = CacheGenConfig.for_num_layers(1); b = torch.tensor([32.0])\n"
        "try:\n    encode_function(torch.ones(1, 2, 3, 1, 4), c, b, b, 4)\n"
        "except Exception as exc:\n    print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError")
    assert "lmcache-core[codec]" in done.stdout
