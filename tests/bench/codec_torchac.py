"""torchac, the arithmetic coder that CacheGen was first built on, on the documented symbols of the
same chunk.

Its package is source that is compiled on first use, without optimisation: here it is built so, and
with -O3 besides. The builds need ninja and a C++ compiler, and are kept where torch keeps such
things. Only its coder is timed: quantisation, the tables, and spreading a table over the symbols,
as its interface wants it, are left out.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.codec_documented import Quantised, quantise
from tests.bench.codec_speed import SpeedRow, Subject, measure

SAMPLED_LAYERS = ((0, 0), (0, 20), (1, 1), (1, 20))
"""Keys and values of layers with many bins and with few: of a whole chunk the spread tables
would take more than a gigabyte.
"""
RAW_BYTES_OF_SYMBOL = 2


@dataclass(frozen=True)
class Build:
    """A way to compile it.

    Attributes:
        name: As the tables say it.
        module: Name of the compiled module.
        flags: For the compiler.
    """

    name: str
    module: str
    flags: tuple[str, ...]


BUILDS = (
    Build("torchac", "bench_torchac_plain", ()),
    Build("torchac -O3", "bench_torchac_o3", ("-O3",)),
)


def compiled(build: Build) -> Any:
    """The compiled coder.

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
    return load(build.module, [str(source)], extra_cflags=list(build.flags))


def spread(
    quantised: Quantised, layers: tuple[tuple[int, int], ...] = SAMPLED_LAYERS
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torchac takes: symbols int16 `[n]`, and for each of them its channel's table, int16
    (bits of a uint16) `[n, 33]`.
    """
    sides, numbers = (torch.tensor(column) for column in zip(*layers, strict=True))
    symbols = quantised.symbols[sides, numbers].transpose(
        1, 2
    )  # Channel by channel, as the documented streams are.
    tables = quantised.cdf()[sides, numbers].unsqueeze(2).expand(-1, -1, symbols.shape[2], -1)
    # Modulo 2^16 with a sign: an int16 has the bits that the coder reads as a uint16.
    tables = (tables + 0x8000) % 0x10000 - 0x8000
    return symbols.flatten().to(torch.int16), tables.to(torch.int16).flatten(0, 2).contiguous()


def measure_torchac(kv: torch.Tensor, name: str, coder: Any) -> SpeedRow:
    """Time one build on a sample of a chunk's symbols, one thread: it has no more.

    Args:
        kv: The chunk.
        name: What the row calls it.
        coder: What `compiled` gave.

    Raises:
        AssertionError: Other symbols came back.
    """
    quantised = quantise(kv)
    symbols, tables = spread(quantised)
    stream = coder.encode_cdf(tables, symbols)
    if not torch.equal(coder.decode_cdf(tables, stream), symbols):
        raise AssertionError("torchac gave other symbols back")
    encode, decode = (
        partial(coder.encode_cdf, tables, symbols),
        partial(coder.decode_cdf, tables, stream),
    )
    num_bytes = symbols.numel() * RAW_BYTES_OF_SYMBOL
    # Its ratio in the container, with tables and maxima of the whole chunk: the streams alone could
    # not be decoded.
    encoded = round(num_bytes * quantised.bits() / (8 * kv.nbytes))
    return measure([Subject(name, 1, num_bytes, encoded, encode, decode)])[0]
