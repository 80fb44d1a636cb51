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
from typing import Any

import torch

from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.serde.cachegen import MAX_BINS, MIN_BINS, CacheGenConfig

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
HEADROOM = 32
"""Of the 16 bits of a distribution, kept for values that do not occur; more bins keep one each.
"""


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
    return _dequantised(xq, centre, torch.as_tensor(max1))


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
    return _dequantised(t, centres, maxtensors).to(dtype)


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


def channel_distributions(symbols: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Return the cumulative distribution of each channel of each layer: `cdf[i] = (0xFFFF - 32) *
    count / total + i`, rounded down.

    `count` is how many of the `total` tokens have a value below `i`. So every value has a
    probability, also one that does not occur.

    Args:
        symbols: uint8 or int8, `[nlayers, ntokens, nchannels]`, values 0 to `num_bins - 1`, any
            device.
        num_bins: The largest number of bins of a layer, at most 256.

    Returns:
        int16 with the bits of uint16, `[nlayers, nchannels, num_bins + 1]`, rising, 0 at first; on
        the device of `symbols`. New.
    """
    num_layers, num_tokens, num_channels = symbols.shape
    values = symbols.view(torch.uint8)
    table = torch.zeros(
        num_layers, num_channels, num_bins + 1, dtype=torch.int64, device=symbols.device
    )
    rows = torch.arange(num_channels, device=symbols.device) * num_bins
    for layer in range(num_layers):
        occurrences = torch.bincount(
            (values[layer] + rows).flatten(), minlength=num_channels * num_bins
        )
        table[layer, :, 1:] = occurrences.view(num_channels, num_bins).cumsum(dim=1)
    scaled = table * (0xFFFF - max(HEADROOM, num_bins)) // max(num_tokens, 1)
    scaled += torch.arange(num_bins + 1, device=symbols.device)
    return ((scaled ^ 0x8000) - 0x8000).to(torch.int16)


class CacheGenEncoderImpl:
    """Quantises keys and values, and counts what occurs. Not thread-safe.

    Args:
        kwargs: `fp_k` and `fp_v`, the keys and values: floating point, `[nlayers, ntokens,
            nchannels]`, any device; only read. `config`, the `CacheGenConfig` of a model with that
            many layers.

    Attributes:
        quantized_key: For each layer its quantised keys, float32 `[ntokens, nchannels]`; empty
            before `quantize`.
        quantized_value: Likewise of the values.
        max_tensors_key: For each layer the largest magnitudes of its keys, `[ntokens, 1]`; for
            `concat_max`.
        max_tensors_value: Likewise of the values.

    Raises:
        LayoutError: A field is missing or unknown, or shapes do not fit the config.
    """

    def __init__(self, **kwargs: Any) -> None:
        if set(kwargs) != {"fp_k", "fp_v", "config"}:
            raise LayoutError(f"fields {sorted(kwargs)}: give fp_k, fp_v, config, and no other")
        self.fp_k: torch.Tensor = kwargs["fp_k"]
        self.fp_v: torch.Tensor = kwargs["fp_v"]
        self.config: CacheGenConfig = kwargs["config"]
        for name, values in (("fp_k", self.fp_k), ("fp_v", self.fp_v)):
            if values.ndim != 3 or values.shape[0] != self.config.nlayers:
                raise LayoutError(
                    f"{name} {tuple(values.shape)}: give [{self.config.nlayers}, ntokens,"
                    " nchannels], as the config has layers"
                )
        self.quantized_key: dict[int, torch.Tensor] = {}
        self.quantized_value: dict[int, torch.Tensor] = {}
        self.max_tensors_key: dict[int, torch.Tensor] = {}
        self.max_tensors_value: dict[int, torch.Tensor] = {}

    def quantize(self) -> None:
        """Quantise all keys and values, each layer with its bins.

        Raises:
            LayoutError: A dtype cannot be quantised, or there are no channels.
        """
        for layer, bins in enumerate(self.config.bins_of_keys()):
            self.quantized_key[layer], self.max_tensors_key[layer] = torch_quant(
                bins, self.fp_k[layer]
            )
        for layer, bins in enumerate(self.config.bins_of_values()):
            self.quantized_value[layer], self.max_tensors_value[layer] = torch_quant(
                bins, self.fp_v[layer]
            )

    def compute_cdf(self, is_key: bool) -> torch.Tensor:
        """Return the distribution of each channel of the quantised keys or values. Call `quantize`
        before.

        Args:
            is_key: Of the keys, else of the values.

        Returns:
            int16 with the bits of uint16, `[nlayers, nchannels, bins + 1]`, with the largest number
            of bins of a layer of these; new.

        Raises:
            LayoutError: Nothing is quantised yet.
        """
        quantised = self.quantized_key if is_key else self.quantized_value
        if not quantised:
            raise LayoutError("nothing is quantised yet: call quantize() before compute_cdf()")
        symbols = torch.stack(
            [quantised[layer].to(torch.uint8) for layer in range(self.config.nlayers)]
        )
        return channel_distributions(
            symbols, max(self.config.bins_of_keys() if is_key else self.config.bins_of_values())
        )


def whole_bins(bins: torch.Tensor, num_layers: int) -> tuple[int, ...]:
    """Return the bins of each layer as checked whole numbers; waits for the device.

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


def _dequantised(symbols: torch.Tensor, centres: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    unsigned = symbols.view(torch.uint8) if symbols.dtype is torch.int8 else symbols
    wide = scale.to(device=symbols.device, dtype=torch.float32)
    return unsigned.to(torch.float32, copy=True).sub_(centres).div_(centres).mul_(wide)
