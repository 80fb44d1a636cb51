"""Yardsticks that share no code with the codecs: the documented CacheGen algorithm, its values and
its size with an ideal coder; and torchac, the arithmetic coder that CacheGen was first built on.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MANY_BINS, FEW_BINS = 32, 16
MANY_BIN_LAYERS = (10, 2)
"""Leading layers of keys, and of values, that have 32 bins; the rest have 16. Models of fewer
than 10 layers have 32 in all.
"""
CDF_TOTAL, CDF_SCALE = 0x10000, 0xFFFF - MANY_BINS
CDF_ENTRY_BITS, LENGTH_BITS, MAX_BITS = 16, 32, 16

TORCHAC_BUILDS = {"torchac": (), "torchac -O3": ("-O3",)}
"""Flags for the compiler, by name. PyPI has its source, which is compiled on first use."""
SAMPLED_LAYERS = ((0, 0), (0, 20), (1, 1), (1, 20))
"""Keys and values of layers with many bins and with few: of a whole chunk the spread tables
would take more than a gigabyte.
"""


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
        """Return what the symbols decode to, bf16."""
        decoded = (self.symbols.float() - self.centres) / self.centres * self.maxima.float()
        return decoded.to(torch.bfloat16)

    def cdf(self) -> torch.Tensor:
        """Return for each layer and channel the distribution of its own symbols: int64 `[2,
        num_layers, hidden, 33]`, 0 … 65,536 ascending.

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
        """Return the bits of all streams if each symbol took exactly the logarithm of its share of
        the table.
        """
        cost = -(self.cdf().diff(dim=-1).double() / CDF_TOTAL).log2()
        return float(cost.gather(-1, self.symbols.transpose(2, 3)).sum())

    def bits(self) -> float:
        """Return the bits of all that the documented container holds: streams, a table and a length
        for each channel, the maxima.
        """
        sides, layers, tokens, hidden = self.symbols.shape
        tables = sides * layers * hidden * ((MANY_BINS + 1) * CDF_ENTRY_BITS + LENGTH_BITS)
        return self.stream_bits() + tables + sides * layers * tokens * MAX_BITS


def quantise(kv: torch.Tensor) -> Quantised:
    """Quantise a chunk, bf16 `[2, num_layers, num_tokens, hidden]`: round `x C / m + C` to the
    nearest, ties to even, each operation in float32.
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


def compiled_torchac(name: str) -> Any:
    """Return the compiled coder of one of `TORCHAC_BUILDS`.

    Raises:
        ImportError: The package is not installed.
        RuntimeError: It cannot be compiled here; the message is the compiler's or says what is
            missing.
    """
    from torch.utils.cpp_extension import load

    spec = importlib.util.find_spec("torchac")
    if spec is None or spec.origin is None:
        raise ImportError("torchac is not installed")
    source = Path(spec.origin).parent / "backend" / "torchac_backend.cpp"
    module = f"bench_{''.join(filter(str.isalnum, name)).lower()}"
    return load(module, [str(source)], extra_cflags=list(TORCHAC_BUILDS[name]))


def torchac_input(
    quantised: Quantised, layers: tuple[tuple[int, int], ...] = SAMPLED_LAYERS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what torchac takes: symbols int16 `[n]`, channel by channel as the documented streams
    are, and for each of them its channel's table, int16 (bits of a uint16) `[n, 33]`.
    """
    sides, numbers = (torch.tensor(column) for column in zip(*layers, strict=True))
    symbols = quantised.symbols[sides, numbers].transpose(1, 2)
    tables = quantised.cdf()[sides, numbers].unsqueeze(2).expand(-1, -1, symbols.shape[2], -1)
    # Modulo 2^16 with a sign: an int16 has the bits that the coder reads as a uint16.
    tables = (tables + 0x8000) % 0x10000 - 0x8000
    return symbols.flatten().to(torch.int16), tables.to(torch.int16).flatten(0, 2).contiguous()
