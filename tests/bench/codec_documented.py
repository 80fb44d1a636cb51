"""The documented CacheGen algorithm, as a yardstick that shares no code with the codecs: its
values, and its size with an ideal coder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MANY_BINS, FEW_BINS = 32, 16
MANY_BIN_LAYERS = (10, 2)
"""Leading layers of keys, and of values, that have 32 bins; the rest have 16. Models of fewer
than 10 layers have 32 in all.
"""
CDF_TOTAL, CDF_SCALE = 0x10000, 0xFFFF - MANY_BINS
CDF_ENTRY_BITS, LENGTH_BITS, MAX_BITS = 16, 32, 16


@dataclass(frozen=True)
class Quantised:
    """A chunk as symbols.

    Attributes:
        symbols: int64 `[2, num_layers, num_tokens, hidden]`, 0 … 2 C.
        maxima: bf16 `[2, num_layers, num_tokens, 1]`, the largest magnitude of each token in each
            layer.
        centres: float32 `[2, num_layers, 1, 1]`: C, half the bins of the layer less one.
    """

    symbols: torch.Tensor
    maxima: torch.Tensor
    centres: torch.Tensor

    def values(self) -> torch.Tensor:
        """What the symbols decode to, bf16."""
        return ((self.symbols.float() - self.centres) / self.centres * self.maxima.float()).to(
            torch.bfloat16
        )

    def cdf(self) -> torch.Tensor:
        """For each layer and channel the distribution of its own symbols: int64 `[2, num_layers,
        hidden, 33]`, 0 … 65,536 ascending.

        The documented table holds `65,503 count / total + i`, cut to an integer; the end of its
        last symbol is read as 65,536.
        """
        sides, layers, tokens, hidden = self.symbols.shape
        place = torch.arange(sides * layers * hidden).view(sides, layers, 1, hidden) * MANY_BINS
        counts = torch.bincount(
            (self.symbols + place).flatten(), minlength=sides * layers * hidden * MANY_BINS
        )
        below = counts.view(sides, layers, hidden, MANY_BINS).cumsum(-1)
        table = torch.zeros(sides, layers, hidden, MANY_BINS + 1, dtype=torch.int64)
        table[..., 1:] = CDF_SCALE * below // tokens
        table += torch.arange(MANY_BINS + 1)
        table[..., -1] = CDF_TOTAL
        return table

    def stream_bits(self) -> float:
        """Bits of all streams if each symbol took exactly the logarithm of its share of the
        table.
        """
        cdf = self.cdf()
        cost = -(cdf.diff(dim=-1).double() / CDF_TOTAL).log2()
        return float(cost.gather(-1, self.symbols.transpose(2, 3)).sum())

    def bits(self) -> float:
        """Everything that the documented container must hold: streams, a table and a length for
        each channel, the maxima.
        """
        sides, layers, tokens, hidden = self.symbols.shape
        channels = sides * layers * hidden
        return (
            self.stream_bits()
            + channels * ((MANY_BINS + 1) * CDF_ENTRY_BITS + LENGTH_BITS)
            + sides * layers * tokens * MAX_BITS
        )


def quantise(kv: torch.Tensor) -> Quantised:
    """Quantise a chunk: round `x C / m + C` to the nearest, ties to even, each operation in
    float32.

    Args:
        kv: bf16 `[2, num_layers, num_tokens, hidden]`.
    """
    num_layers = kv.shape[1]
    leading = [num_layers] * 2 if num_layers < MANY_BIN_LAYERS[0] else MANY_BIN_LAYERS
    bins = torch.tensor(
        [
            [MANY_BINS if layer < many else FEW_BINS for layer in range(num_layers)]
            for many in leading
        ]
    )
    centres = (bins // 2 - 1).float()[:, :, None, None]
    maxima = kv.abs().amax(-1, keepdim=True)
    divisors = maxima.float().masked_fill(maxima == 0, 1.0)
    return Quantised((kv.float() * centres / divisors + centres).round().long(), maxima, centres)
