"""Probability tables of all alphabets on one device: created once, used for every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lmcache_kernels.codec_shape import MAX_LEVELS, PRECISION_BITS
from lmcache_kernels.errors import KernelInputError

MAX_KEPT = 64
Integers = npt.NDArray[np.int64]


class Alphabet(Protocol):
    """The tables for symbols in `-levels … levels`."""

    @property
    def levels(self) -> int:
        """Largest symbol, at most `MAX_LEVELS`."""

    @property
    def frequencies(self) -> Any:
        """int64 `[tables, 2 * levels + 1]`; each row sums to `2^PRECISION_BITS`; tight and wide
        tables alternate.
        """


@dataclass(frozen=True, eq=False)
class CodecTables:
    """The tables of several alphabets, concatenated. Create them with `CodecTables.of`.

    An alphabet's tables have `stride` entries each, the next power of two above `2 * levels`; the
    entries after its symbols are zeros.

    Attributes:
        levels: Levels of each alphabet.
        first_entries: Index of each alphabet's first entry in the flat arrays.
        strides: Number of entries of one table of each alphabet.
        start_and_frequency: int32 `[entries]`: first slot of the symbol (upper half), frequency
        (lower half).
        slot_symbol: uint8 `[alphabets, tables * 2^PRECISION_BITS]`: the symbol (plus `levels`) of
        each slot.
    """

    levels: tuple[int, ...]
    first_entries: tuple[int, ...]
    strides: tuple[int, ...]
    start_and_frequency: torch.Tensor
    slot_symbol: torch.Tensor
    _kept: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, alphabets: Sequence[Alphabet], device: torch.device) -> CodecTables:
        """Copy tables to a device.

        Args:
            alphabets: Alphabets, all with the same number of tables.
            device: The device.

        Raises:
            KernelInputError: The sizes of the arrays do not match, or a row does not sum to
                `2^PRECISION_BITS`.
        """
        if not alphabets:
            raise KernelInputError("no tables")
        for alphabet in alphabets:
            _check(alphabet, len(alphabets[0].frequencies))
        rows = [_padded(alphabet) for alphabet in alphabets]
        sizes = [row.size for row in rows]
        starts = [np.where(row > 0, np.cumsum(row, 1) - row, 0).ravel() for row in rows]
        frequency, start = np.concatenate([row.ravel() for row in rows]), np.concatenate(starts)
        slots = np.stack(
            [
                np.concatenate([np.repeat(np.arange(len(of_table)), of_table) for of_table in row])
                for row in rows
            ]
        )
        return cls(
            tuple(alphabet.levels for alphabet in alphabets),
            tuple(sum(sizes[:i]) for i in range(len(sizes))),
            tuple(row.shape[1] for row in rows),
            torch.from_numpy((start << 16 | frequency).astype(np.int32)).to(device),
            torch.from_numpy(slots.astype(np.uint8)).to(device),
        )

    @property
    def device(self) -> torch.device:
        """The tables' device."""
        return self.start_and_frequency.device

    @property
    def num_tables(self) -> int:
        """Number of tables of each alphabet."""
        return self.slot_symbol.shape[1] >> PRECISION_BITS

    def of_planes(self, levels: Sequence[int]) -> torch.Tensor:
        """Return the facts about each plane that kernels need. They are kept on the device, for as
        many as `MAX_KEPT` kinds of chunks: sending them waits for it.

        Args:
            levels: Levels of each plane.

        Returns:
            int32 `[planes, 4]` on the tables' device: levels, number of the alphabet, its first
                entry, its stride.

        Raises:
            KernelInputError: There are no tables for some levels.
        """
        kept = self._kept.get(tuple(levels))
        if kept is not None:
            return kept
        rows = {
            own: (own, i, self.first_entries[i], self.strides[i])
            for i, own in enumerate(self.levels)
        }
        absent = set(levels) - set(rows)
        if absent:
            raise KernelInputError(
                f"no tables for {min(absent)} levels; there are tables for"
                f" {', '.join(map(str, self.levels))}"
            )
        planes = torch.tensor([rows[own] for own in levels], dtype=torch.int32).to(self.device)
        if len(self._kept) < MAX_KEPT:  # none is dropped: a launch may still read it
            self._kept[tuple(levels)] = planes
        return planes


def _check(alphabet: Alphabet, num_tables: int) -> None:
    expected = num_tables, 2 * alphabet.levels + 1
    if not 0 < alphabet.levels <= MAX_LEVELS or alphabet.frequencies.shape != expected:
        raise KernelInputError(
            f"the tables for {alphabet.levels} levels have sizes {alphabet.frequencies.shape};"
            f" expected {expected}"
        )
    if (alphabet.frequencies < 0).any() or (
        alphabet.frequencies.sum(1) != 1 << PRECISION_BITS
    ).any():
        raise KernelInputError(
            f"the tables for {alphabet.levels} levels do not sum to {1 << PRECISION_BITS}"
        )


def _padded(alphabet: Alphabet) -> Integers:
    size = 2 * alphabet.levels + 1
    rows = np.zeros((len(alphabet.frequencies), 1 << (size - 1).bit_length()), np.int64)
    rows[:, :size] = alphabet.frequencies
    return rows
