"""Quantising and counting of keys and values, step by step, as documented. Needs torch."""

from __future__ import annotations

from typing import Any

import torch

from lmcache_core.errors import LayoutError
from lmcache_core.serde.cachegen.config import CacheGenConfig
from lmcache_core.serde.cachegen.distributions import channel_distributions
from lmcache_core.serde.cachegen.quantization import torch_quant

_FIELDS = ("fp_k", "fp_v", "config")


class CacheGenEncoderImpl:
    """Quantises keys and values, and counts what occurs. Not thread-safe.

    Args:
        kwargs: `fp_k` and `fp_v`, the keys and values: floating point, `[nlayers, ntokens,
            nchannels]`, any device; only read. `config`, the `CacheGenConfig` of a model with that
            many layers.

    Attributes:
        fp_k: As given.
        fp_v: As given.
        config: As given.
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
        if set(kwargs) != set(_FIELDS):
            raise LayoutError(f"fields {sorted(kwargs)}: give {', '.join(_FIELDS)}, and no other")
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
        """The distribution of each channel of the quantised keys or values. Call `quantize` before.

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
