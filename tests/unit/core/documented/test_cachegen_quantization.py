"""Quantising to the bit: the written order of fp32 operations, at ties and where another order
gives another value.
"""

from __future__ import annotations

import math

import numpy as np
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
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# bins, x, m, q. Ties first: m = C, so that x * C / m is x itself, and x + C lies in the middle.
QUANTISED = [
    (32, "0x1.0p-1", "0x1.ep+3", 16),
    (32, "-0x1.0p-1", "0x1.ep+3", 14),
    (32, "0x1.8p+0", "0x1.ep+3", 16),
    (32, "-0x1.8p+0", "0x1.ep+3", 14),
    (32, "0x1.4p+1", "0x1.ep+3", 18),
    (32, "-0x1.dp+3", "0x1.ep+3", 0),
    (32, "0x1.dp+3", "0x1.ep+3", 30),
    (16, "0x1.0p-1", "0x1.cp+2", 8),
    (16, "-0x1.0p-1", "0x1.cp+2", 6),
    (16, "0x1.ap+2", "0x1.cp+2", 14),
    (4, "0x1.0p-1", "0x1.0p+0", 2),
    (4, "-0x1.0p-1", "0x1.0p+0", 0),
    # The largest and the smallest value, and nothing.
    (32, "0x1.ep+3", "0x1.ep+3", 30),
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
    (32, 30, "0x1.44f2b8p+0", "0x1.44f2b8p+0"),
    (32, 0, "0x1.44f2b8p+0", "-0x1.44f2b8p+0"),
    (32, 7, "0x1.44f2b8p+0", "-0x1.5a9c82p-1"),
    (32, 2, "0x1.0f9a30p+0", "-0x1.d6c6fep-1"),
    (16, 2, "0x1.f25370p+0", "-0x1.63f276p+0"),
    (16, 1, "0x1.114db8p+0", "-0x1.d4853cp-1"),
]


@pytest.mark.parametrize(("bins", "x", "m", "q"), QUANTISED)
def test_quantising_to_the_bit(bins: int, x: str, m: str, q: int) -> None:
    row = torch.tensor([float.fromhex(x), float.fromhex(m)], device=DEVICE)
    quantised, maxes = torch_quant(bins, row)
    assert quantised.dtype == torch.float32
    assert quantised.tolist() == [q, bins - 2]
    assert maxes.tolist() == [float.fromhex(m)]
    assert row.tolist() == [float.fromhex(x), float.fromhex(m)], "the input is only read"


@pytest.mark.parametrize(("bins", "x", "m", "q"), QUANTISED)
def test_many_values_at_once_are_quantised_as_one(bins: int, x: str, m: str, q: int) -> None:
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


def reference(x: torch.Tensor, bins: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, written down once more: values and largest magnitudes as numpy has them in fp32,
    and what comes back.
    """
    wide = x.float().cpu().numpy()
    c = np.array([b // 2 - 1 for b in bins], dtype=np.float32)[:, None, None]
    m = np.abs(wide).max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        q = np.rint(((wide * c) / m) + c)
    q = np.minimum(np.maximum(np.where(m == 0, c, q), np.float32(0)), 2 * c)
    return q, m, ((q - c) / c) * m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 5, 7), (3, 64, 129)])
def test_random_values_as_the_reference(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    bins = [32, 16, 256]
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 3).to(dtype).to(DEVICE)
    x[0, 0] = 0
    q, m, back = reference(x, bins)
    quantised, maxes = torch_quant_vectorized(torch.tensor(bins), x)
    assert maxes.dtype == dtype
    assert np.array_equal(quantised.view(torch.uint8).cpu().numpy(), q)
    assert np.array_equal(maxes.float().cpu().numpy(), m)
    for t in (quantised, quantised.view(torch.uint8), torch.from_numpy(q).to(DEVICE)):
        assert np.array_equal(do_dequantize(t, torch.tensor(bins), maxes).cpu().numpy(), back)
    rounded = do_dequantize(quantised, torch.tensor(bins), maxes, dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.cpu(), torch.from_numpy(back).to(dtype))
    for layer, number in enumerate(bins):
        single, single_max = torch_quant(number, x[layer])
        assert np.array_equal(single.cpu().numpy(), q[layer])
        assert torch.equal(single_max, maxes[layer])
        assert np.array_equal(quant(number, single, single_max).cpu().numpy(), back[layer])


def test_a_view_is_quantised_as_its_copy() -> None:
    x = torch.randn(7, 5, 3, dtype=torch.bfloat16).permute(2, 1, 0)
    viewed, copied = (
        torch_quant_vectorized(torch.tensor([32] * 3), x),
        torch_quant_vectorized(torch.tensor([32] * 3), x.contiguous()),
    )
    assert torch.equal(viewed[0], copied[0])
    assert torch.equal(viewed[1], copied[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_come_back_as_zeros(dtype: torch.dtype) -> None:
    quantised, maxes = torch_quant_vectorized(torch.tensor([32]), torch.zeros(1, 2, 5, dtype=dtype))
    assert (quantised == 15).all()
    assert (do_dequantize(quantised, torch.tensor([32]), maxes) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spoils_its_token_only(bad: float) -> None:
    x = torch.ones(1, 3, 4)
    x[0, 1, 2] = bad
    quantised, maxes = torch_quant_vectorized(torch.tensor([16]), x)
    decoded = do_dequantize(quantised, torch.tensor([16]), maxes)
    assert quantised[0, 1].tolist() == [7, 7, 7, 7]
    assert decoded[0, 1].isnan().all()
    assert torch.equal(decoded[0, [0, 2]], x[0, [0, 2]])


def test_the_smallest_and_largest_magnitudes() -> None:
    tiny = torch.tensor([[[2.0**-149, 0.0, -(2.0**-149)]]])
    quantised, maxes = torch_quant_vectorized(torch.tensor([32]), tiny)
    assert quantised.flatten().tolist() == [30, 15, 0]
    assert torch.equal(do_dequantize(quantised, torch.tensor([32]), maxes), tiny)
    huge = torch.tensor([[[3e38, 2.9e38, -3e38]]])
    assert torch_quant_vectorized(torch.tensor([32]), huge)[0].flatten().tolist() == [30, 30, 0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats(dtype: torch.dtype) -> None:
    x = torch.tensor([[[1.5, -0.5, 0.25, 0.0]]]).to(dtype)
    quantised, maxes = torch_quant_vectorized(torch.tensor([32]), x)
    assert (maxes.dtype, maxes.float().tolist()) == (dtype, [[[1.5]]])
    assert quantised.flatten().tolist() == [30, 10, 18, 15], "17.5 is a tie"


def test_no_tokens() -> None:
    quantised, maxes = torch_quant_vectorized(torch.tensor([32, 32]), torch.empty(2, 0, 3))
    assert (quantised.shape, maxes.shape) == ((2, 0, 3), (2, 0, 1))
    assert do_dequantize(quantised, torch.tensor([32, 32]), maxes).shape == (2, 0, 3)


@pytest.mark.parametrize("bins", [2, 3, 33, 258, 32.5, math.nan])
def test_unusable_bins(bins) -> None:
    with pytest.raises(ConfigError, match="even number, 4 to 256"):
        torch_quant(bins, torch.ones(3))
    with pytest.raises(ConfigError, match="even number, 4 to 256"):
        quant(bins, torch.ones(3), 1.0)
    with pytest.raises(ConfigError, match="even number, 4 to 256"):
        torch_quant_vectorized(torch.tensor([32, bins]), torch.ones(2, 1, 3))
    with pytest.raises(ConfigError, match="even number, 4 to 256"):
        do_dequantize(torch.ones(2, 1, 3), torch.tensor([32, bins]), torch.ones(2, 1, 1))


@pytest.mark.parametrize(
    ("bins", "values"),
    [
        (torch.tensor([32]), torch.ones(2, 1, 3)),
        (torch.tensor(32), torch.ones(1, 1, 3)),
        (torch.tensor([32]), torch.ones(1, 3)),
        (torch.tensor([32]), torch.ones(1, 3, 0)),
        (torch.tensor([32]), torch.ones(1, 3, 2, dtype=torch.int32)),
        (torch.tensor([32]), torch.ones(1, 3, 2, dtype=torch.float64)),
    ],
)
def test_unusable_values(bins: torch.Tensor, values: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match="give"):
        torch_quant_vectorized(bins, values)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 1), (1, 3, 2), (1, 2, 1)])
def test_magnitudes_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"give \(1, 3, 1\)"):
        do_dequantize(torch.ones(1, 3, 2), torch.tensor([32]), torch.ones(shape))


def test_magnitudes_of_layers_are_put_together_in_order() -> None:
    layers = {1: torch.full((3, 1), 1.0), 0: torch.full((3, 1), 0.0), 2: torch.full((3, 1), 2.0)}
    assert concat_max(layers).tolist() == [[[float(layer)]] * 3 for layer in range(3)]


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {1: torch.ones(1)},
        {0: torch.ones(1), 2: torch.ones(1)},
        {0: torch.ones(1), 1: torch.ones(2)},
        {0: torch.ones(1), 1: torch.ones(1).half()},
    ],
)
def test_magnitudes_that_cannot_be_put_together(layers: dict[int, torch.Tensor]) -> None:
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


KV, CONFIG = torch.ones(2, 3, 4), CacheGenConfig.for_num_layers(2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"fp_k": KV, "config": CONFIG},
        {"fp_k": KV, "fp_v": torch.ones(3, 3, 4), "config": CONFIG},
        {"fp_k": torch.ones(2, 3), "fp_v": KV, "config": CONFIG},
        {"fp_k": KV, "fp_v": KV, "config": CONFIG, "more": 1},
    ],
)
def test_fields_of_the_encoder(fields) -> None:
    with pytest.raises(LayoutError, match="give"):
        CacheGenEncoderImpl(**fields)
