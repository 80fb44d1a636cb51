"""Quantising to the bit: the written order of fp32 operations, at ties and where another order
gives another value.
"""

from __future__ import annotations

import math

import pytest
import torch
from lmcache_core.documented.cachegen.quantization import CacheGenEncoderImpl
from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.serde.cachegen import (
    CacheGenConfig,
    concat_max,
    do_dequantize,
    quant,
    torch_quant,
    torch_quant_vectorized,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# bins, x, m, q. Ties first: m = C, so that x * C / m is x itself, and x + C lies in the middle.
QUANTISED = [
    (32, "0x1.0p-1", "0x1.ep+3", 16),
    (32, "-0x1.8p+0", "0x1.ep+3", 14),
    (32, "-0x1.dp+3", "0x1.ep+3", 0),
    (16, "0x1.0p-1", "0x1.cp+2", 8),
    (16, "0x1.ap+2", "0x1.cp+2", 14),
    (4, "-0x1.0p-1", "0x1.0p+0", 0),
    # The smallest value, nothing, and the largest value.
    (32, "-0x1.ep+3", "0x1.ep+3", 0),
    (32, "-0x0p+0", "0x1.ep+3", 15),
    (256, "0x1.0p+0", "0x1.0p+0", 254),
    # x * (C / m), x / m * C and fused operations give 5.
    (32, "-0x1.414a52p+1", "0x1.fb4cecp+1", 6),
    # Multiplying by the reciprocal of m gives 7.
    (32, "-0x1.e7a0c0p+1", "0x1.ae428cp+2", 6),
    # More precision, or rounding before C is added, gives 9.
    (32, "-0x1.de614ep+0", "0x1.13fd10p+2", 8),
    # The same for 16 bins: they give 1, 4 and 7.
    (16, "-0x1.7299ecp+2", "0x1.d7aca0p+2", 2),
    (16, "-0x1.bcaf4ap-1", "0x1.bcaf48p+0", 3),
    (16, "0x1.22d4a6p-1", "0x1.fcf424p+2", 8),
]
# bins, q, m, value. Another order or more precision gives the neighbour.
DEQUANTISED = [
    (32, 15, "0x1.0p+0", "0x0.0p+0"),
    (32, 7, "0x1.44f2b8p+0", "-0x1.5a9c82p-1"),
    (16, 1, "0x1.114db8p+0", "-0x1.d4853cp-1"),
]


@pytest.mark.parametrize(("bins", "x", "m", "q"), QUANTISED)
def test_quantising_to_the_bit(bins: int, x: str, m: str, q: int) -> None:
    row = torch.tensor([float.fromhex(x), float.fromhex(m)], device=DEVICE)
    quantised, maxes = torch_quant(bins, row)
    assert quantised.dtype == torch.float32
    assert quantised.tolist() == [q, bins - 2]
    assert maxes.tolist() == [float.fromhex(m)]
    rows = torch.tensor([[[float.fromhex(x)] * 37 + [-float.fromhex(m)]] * 3] * 2, device=DEVICE)
    quantised, maxes = torch_quant_vectorized(torch.tensor([bins] * 2), rows)
    assert (quantised.dtype, quantised.shape, maxes.shape) == (torch.int8, rows.shape, (2, 3, 1))
    assert (quantised.view(torch.uint8)[..., :37] == q).all()
    assert (quantised[..., 37] == 0).all()


@pytest.mark.parametrize(("bins", "q", "m", "value"), DEQUANTISED)
def test_dequantising_to_the_bit(bins: int, q: int, m: str, value: str) -> None:
    wanted = float.fromhex(value)
    assert quant(bins, torch.tensor([q], device=DEVICE), float.fromhex(m)).tolist() == [wanted]
    t = torch.full((2, 3, 37), q, dtype=torch.uint8, device=DEVICE)
    maxes = torch.full((2, 3, 1), float.fromhex(m), device=DEVICE)
    decoded = do_dequantize(t, torch.tensor([bins] * 2), maxes)
    assert decoded.dtype == torch.float32
    assert (decoded == wanted).all()
    assert (t == q).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_its_token_only(bad: float) -> None:
    x = torch.ones(1, 3, 4)
    x[0, 1, 2] = bad
    quantised, maxes = torch_quant_vectorized(torch.tensor([16]), x)
    decoded = do_dequantize(quantised, torch.tensor([16]), maxes)
    assert quantised[0, 1].tolist() == [7, 7, 7, 7]
    assert decoded[0, 1].isnan().all()
    assert torch.equal(decoded[0, [0, 2]], x[0, [0, 2]])


@pytest.mark.parametrize("bins", [2, 33, 258, math.nan])
def test_unusable_bins_are_refused(bins) -> None:
    layers = torch.tensor([32, bins])
    for call in (
        lambda: torch_quant(bins, torch.ones(3)),
        lambda: quant(bins, torch.ones(3), 1.0),
        lambda: torch_quant_vectorized(layers, torch.ones(2, 1, 3)),
        lambda: do_dequantize(torch.ones(2, 1, 3), layers, torch.ones(2, 1, 1)),
    ):
        with pytest.raises(ConfigError, match="even number, 4 to 256"):
            call()


@pytest.mark.parametrize(
    ("bins", "values"),
    [
        (torch.tensor([32]), torch.ones(2, 1, 3)),
        (torch.tensor([32]), torch.ones(1, 3)),
        (torch.tensor([32]), torch.ones(1, 3, 0)),
        (torch.tensor([32]), torch.ones(1, 3, 2, dtype=torch.float64)),
    ],
)
def test_unusable_values_are_refused(bins: torch.Tensor, values: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match="give"):
        torch_quant_vectorized(bins, values)


def test_magnitudes_of_layers_are_put_together_in_order() -> None:
    layers = {1: torch.full((3, 1), 1.0), 0: torch.full((3, 1), 0.0), 2: torch.full((3, 1), 2.0)}
    assert concat_max(layers).tolist() == [[[float(layer)]] * 3 for layer in range(3)]


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {0: torch.ones(1), 2: torch.ones(1)},
        {0: torch.ones(1), 1: torch.ones(2)},
        {0: torch.ones(1), 1: torch.ones(1).half()},
    ],
)
def test_magnitudes_of_unlike_layers_are_refused(layers: dict[int, torch.Tensor]) -> None:
    with pytest.raises(LayoutError, match="give"):
        concat_max(layers)


def test_the_encoder_step_by_step_is_the_vectorised_one() -> None:
    config = CacheGenConfig.for_num_layers(11)
    fp_k, fp_v = torch.randn(11, 20, 6).bfloat16(), torch.randn(11, 20, 6).bfloat16()
    encoder = CacheGenEncoderImpl(fp_k=fp_k, fp_v=fp_v, config=config)
    with pytest.raises(LayoutError, match="call quantize"):
        encoder.compute_cdf(is_key=True)
    encoder.quantize()
    for bins, values, quantised, maxes in (
        (config.bins_of_keys(), fp_k, encoder.quantized_key, encoder.max_tensors_key),
        (config.bins_of_values(), fp_v, encoder.quantized_value, encoder.max_tensors_value),
    ):
        wanted, wanted_maxes = torch_quant_vectorized(torch.tensor(bins), values)
        assert torch.equal(concat_max(quantised), wanted.float())
        assert torch.equal(concat_max(maxes), wanted_maxes)
    cdf = encoder.compute_cdf(is_key=True)
    assert (cdf.dtype, cdf.shape) == (torch.int16, (11, 6, 33))
    for layer, channel, i in ((0, 0, 15), (10, 5, 8), (3, 2, 32)):
        below = int((encoder.quantized_key[layer][:, channel] < i).sum())
        assert int(cdf[layer, channel, i]) & 0xFFFF == (0xFFFF - 32) * below // 20 + i
    assert encoder.compute_cdf(is_key=False).shape == (11, 6, 33)


def test_wrong_fields_of_the_encoder_are_refused() -> None:
    fields = {"fp_k": torch.ones(2, 3, 4), "config": CacheGenConfig.for_num_layers(2)}
    for wrong in (fields, fields | {"fp_v": torch.ones(3, 3, 4)}):
        with pytest.raises(LayoutError, match="give"):
            CacheGenEncoderImpl(**wrong)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 1), (1, 3, 2)])
def test_magnitudes_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"give \(1, 3, 1\)"):
        do_dequantize(torch.ones(1, 3, 2), torch.tensor([32]), torch.ones(shape))
