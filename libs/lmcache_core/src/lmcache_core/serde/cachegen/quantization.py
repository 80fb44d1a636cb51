"""Quantising of KV, specified to the bit: every step is one fp32 operation, rounded to fp32, in the
order written here. Needs torch.

With `bins` bins, `C = bins // 2 - 1`, and for each layer and token `m` = the largest magnitude of
its channels, in the input's dtype:

    q = clamp(rne(((x * C) / m) + C), 0, 2 * C)        x and m widened to fp32
    x' = ((q - C) / C) * m

No fused multiply-add, IEEE division, ties to even. Where `((x * C) / m) + C` is not a number, `q =
C`: for a token of zeros (`m == 0`), which comes back as zeros, and for one that holds an infinity
or a NaN, which comes back as NaN in all its channels.

Divisors are always tensors: torch on CUDA divides by a Python number by multiplying with its
reciprocal, which rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.serde.cachegen.config import MAX_BINS, MIN_BINS

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def torch_quant(bins: int, qA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor to the same number of bins everywhere.

    Args:
        bins: Even, 4 to 256.
        qA: Floating point, `[..., channels]`, any device.

    Returns:
        The quantised values, whole numbers 0 to `bins - 2`, as float32 of the shape of `qA`; and
        the largest magnitudes, `[..., 1]`, in the dtype of `qA`. Both new.

    Raises:
        ConfigError: The bins cannot be used.
        LayoutError: The tensor is of another dtype or has no channels.
    """
    return _quantised(qA, _centres((bins,), qA.device).reshape(()))


def torch_quant_vectorized(
    bins: torch.Tensor, input_groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each layer to its own number of bins.

    Args:
        bins: Of each layer, `[nlayers]`, any dtype; even, 4 to 256.
        input_groups: Floating point, `[nlayers, ntokens, nchannels]`, any device.

    Returns:
        The quantised values, int8 of the same shape: their bits are those of the uint8 value, which
        matters above 128 bins only; and the largest magnitudes, `[nlayers, ntokens, 1]`, in the
        dtype of `input_groups`. Both new.

    Raises:
        ConfigError: Bins cannot be used.
        LayoutError: Shapes or dtypes are others.
    """
    centres = _layer_centres(bins, input_groups)
    quantised, maxes = _quantised(input_groups, centres)
    return quantised.to(torch.uint8).view(torch.int8), maxes


def quant(bins: int, xq: torch.Tensor, max1: float | torch.Tensor) -> torch.Tensor:
    """Undo `torch_quant`.

    Args:
        bins: As given there.
        xq: Quantised values, `[..., channels]`, any dtype.
        max1: The largest magnitude, or a tensor of them that fits `[..., 1]`.

    Returns:
        The values, float32, of the shape of `xq`. New.

    Raises:
        ConfigError: The bins cannot be used.
    """
    centre = _centres((bins,), xq.device).reshape(())
    scale = torch.as_tensor(max1, dtype=torch.float32, device=xq.device)
    return _unsigned(xq).to(torch.float32, copy=True).sub_(centre).div_(centre).mul_(scale)


def do_dequantize(
    t: torch.Tensor,
    bins: torch.Tensor,
    maxtensors: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Undo `torch_quant_vectorized`.

    Args:
        t: Quantised values, `[nlayers, ntokens, nchannels]`, any dtype. Not changed.
        bins: Of each layer, `[nlayers]`.
        maxtensors: Largest magnitudes, `[nlayers, ntokens, 1]`.
        dtype: What the fp32 result is rounded to.

    Returns:
        The values, in that dtype, of the shape of `t`. New.

    Raises:
        ConfigError: Bins cannot be used.
        LayoutError: Shapes do not fit one another.
    """
    centres = _layer_centres(bins, t)
    if tuple(maxtensors.shape) != (*t.shape[:2], 1):
        raise LayoutError(
            f"maxtensors {tuple(maxtensors.shape)} do not fit values {tuple(t.shape)}: give"
            f" {(*t.shape[:2], 1)}"
        )
    scale = maxtensors.to(device=t.device, dtype=torch.float32)
    return (
        _unsigned(t).to(torch.float32, copy=True).sub_(centres).div_(centres).mul_(scale).to(dtype)
    )


def concat_max(max1: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Put the largest magnitudes of single layers together.

    Args:
        max1: For each layer, 0 to `nlayers - 1` in any order, a tensor of the same shape.

    Returns:
        `[nlayers, *shape]`, new.

    Raises:
        LayoutError: There are none, a layer is missing, or shapes or dtypes differ.
    """
    if not max1 or set(max1) != set(range(len(max1))):
        raise LayoutError(
            f"largest magnitudes of layers {sorted(max1)}: give those of 0 to nlayers - 1, all of"
            " them"
        )
    layers = [max1[layer] for layer in range(len(max1))]
    if len({(tuple(layer.shape), layer.dtype) for layer in layers}) > 1:
        raise LayoutError(
            "largest magnitudes differ in shape or dtype between layers: give equal ones"
        )
    return torch.stack(layers)


def bins_tensor(bins: Sequence[int]) -> torch.Tensor:
    """Bins of each layer as the documented functions take them: float32, `[nlayers]`, on the
    CPU.
    """
    return torch.tensor(bins, dtype=torch.float32)


def whole_bins(bins: torch.Tensor, num_layers: int) -> tuple[int, ...]:
    """Bins of each layer as checked whole numbers; waits for the device.

    Raises:
        ConfigError: They cannot be used.
        LayoutError: They are not one for each layer.
    """
    if tuple(bins.shape) != (num_layers,):
        raise LayoutError(
            f"bins {tuple(bins.shape)} for {num_layers} layers: give one number for each layer"
        )
    return tuple(_checked(value) for value in bins.tolist())


def _checked(bins: float) -> int:
    if not (MIN_BINS <= bins <= MAX_BINS and bins % 2 == 0):
        raise ConfigError(
            f"bins {bins!r} cannot be used: give an even number, {MIN_BINS} to {MAX_BINS}"
        )
    return int(bins)


def _centres(bins: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(
        [_checked(value) // 2 - 1 for value in bins], dtype=torch.float32, device=device
    )


def _layer_centres(bins: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if values.ndim != 3:
        raise LayoutError(f"values {tuple(values.shape)}: give [nlayers, ntokens, nchannels]")
    return _centres(whole_bins(bins, values.shape[0]), values.device)[:, None, None]


def _quantised(values: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if values.dtype not in KV_DTYPES:
        raise LayoutError(
            f"values of {values.dtype} cannot be quantised: give one of"
            f" {', '.join(map(str, KV_DTYPES))}"
        )
    if values.ndim == 0 or values.shape[-1] == 0:
        raise LayoutError(f"values {tuple(values.shape)} have no channels: give at least one")
    wide = values.detach().to(torch.float32, copy=True)
    maxes = wide.abs().amax(dim=-1, keepdim=True)
    quantised = wide.mul_(centres).div_(maxes).add_(centres).round_()
    quantised = torch.where(quantised.isnan(), centres, quantised).clamp_(min=0)
    return torch.minimum(quantised, centres + centres, out=quantised), maxes.to(values.dtype)


def _unsigned(symbols: torch.Tensor) -> torch.Tensor:
    return symbols.view(torch.uint8) if symbols.dtype is torch.int8 else symbols
