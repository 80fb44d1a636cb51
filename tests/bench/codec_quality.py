"""What an encoding costs the model: bits for each element against the loss on the text that
follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from tests.bench.codec_model import READ_TOKENS, Reader, Windows
from tests.bench.codec_schemes import Scheme

NORMAL_95 = 1.96


@dataclass(frozen=True)
class Change:
    """A relative change with its uncertainty: `value` plus or minus `half_width` at 95 %."""

    value: float
    half_width: float


@dataclass(frozen=True)
class QualityRow:
    """One scheme.

    Attributes:
        name: Its name.
        bits: For each element, all counted.
        bits_per_byte: Loss of the model on the text behind the prefix.
        change: Of that loss, relative to reading unencoded KV.
        divergence: Mean Kullback-Leibler divergence from the next-token distribution that unencoded
            KV gives, nats.
        agreement: Share of the places where the likeliest token is the same.
    """

    name: str
    bits: float
    bits_per_byte: float
    change: Change
    divergence: float
    agreement: float


def relative_change(base: torch.Tensor, other: torch.Tensor, groups: torch.Tensor) -> Change:
    """The relative change of a total, from pairs: its 95 % interval counts what is in one group as
    one observation.

    Args:
        base: Losses without the change, float64 `[n]`.
        other: Losses with it.
        groups: int64 `[n]`, which document each is from; two at least.

    Raises:
        ValueError: There is only one group: its spread says nothing.
    """
    total = base.sum()
    value = (other - base).sum() / total
    names, places = groups.unique(return_inverse=True)
    if len(names) < 2:
        raise ValueError("an interval needs text from two documents at least")
    residuals = torch.zeros(len(names), dtype=torch.float64).index_add_(
        0, places, other - base - value * base
    )
    variance = residuals.square().sum() * len(names) / (len(names) - 1)
    return Change(float(value), NORMAL_95 * float(variance.sqrt() / total))


@dataclass(frozen=True)
class _Reading:
    """Of a few windows, float64 `[n]` each."""

    num_bits: float
    base: torch.Tensor
    nats: torch.Tensor
    divergence: torch.Tensor
    agreement: torch.Tensor


class QualityBench:
    """Reads the same windows with each scheme; pairs with the windows read from unencoded KV."""

    def __init__(self, reader: Reader, windows: Windows, pool: Executor) -> None:
        self._reader = reader
        self._windows = windows
        self._pool = pool
        self._batches = list(windows.batches())
        self._expected = list(
            pool.map(
                lambda batch: reader.log_probs(windows.ids[batch], windows.kv[batch]), self._batches
            )
        )

    def measure(self, scheme: Scheme) -> QualityRow:
        """Encode, decode and read every window; a scheme is applied in several threads at once."""
        windows = self._windows
        readings = list(
            self._pool.map(
                lambda batch, expected: self._read(scheme, batch, expected),
                self._batches,
                self._expected,
            )
        )
        nats = torch.cat([reading.nats for reading in readings])
        return QualityRow(
            name=scheme.name,
            bits=sum(reading.num_bits for reading in readings) / windows.kv.numel(),
            bits_per_byte=float(nats.sum()) / math.log(2) / int(windows.num_bytes.sum()),
            change=relative_change(
                torch.cat([reading.base for reading in readings]), nats, windows.documents
            ),
            divergence=float(torch.cat([reading.divergence for reading in readings]).mean()),
            agreement=float(torch.cat([reading.agreement for reading in readings]).mean()),
        )

    def _read(self, scheme: Scheme, batch: Sequence[int], expected: torch.Tensor) -> _Reading:
        windows = self._windows
        kv, num_bits = self._through(scheme, batch)
        # The same bits give the same predictions: computing them again would only take time.
        is_same = torch.equal(kv.view(torch.int16), windows.kv[batch].view(torch.int16))
        found = expected if is_same else self._reader.log_probs(windows.ids[batch], kv)
        targets = windows.ids[batch, -READ_TOKENS:].unsqueeze(-1)
        return _Reading(
            num_bits=num_bits,
            base=-expected.gather(-1, targets).double().sum((1, 2)),
            nats=-found.gather(-1, targets).double().sum((1, 2)),
            divergence=(expected.exp() * (expected - found)).sum(-1).double().mean(1),
            agreement=(expected.argmax(-1) == found.argmax(-1)).double().mean(1),
        )

    def _through(self, scheme: Scheme, batch: Sequence[int]) -> tuple[torch.Tensor, float]:
        num_bits, prefixes = 0.0, []
        for window in batch:
            decoded = []
            for chunk in self._windows.chunks(window):
                values, bits = scheme.apply(chunk)
                decoded.append(values)
                num_bits += bits
            prefixes.append(torch.cat(decoded, dim=2))
        return torch.stack(prefixes), num_bits
