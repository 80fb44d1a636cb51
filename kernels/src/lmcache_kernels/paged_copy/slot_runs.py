"""Runs of tokens that are adjacent in the chunk and in the pages, found once for all layers of a
copy on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Adjacent tokens in one block.

    Attributes:
        token: First token in the chunk.
        block: Block that contains them.
        offset: First token in the block.
        length: Number of tokens.
    """

    token: int
    block: int
    offset: int
    length: int


@dataclass(frozen=True)
class SlotRuns:
    """A chunk as equal units of adjacent tokens, with at most one run before and after that does
    not fill a unit.

    ```
    chunk:   | edge |  unit  |  unit  |  …  |  unit  | edge |
             0      begin                           end     num_tokens
    ```

    Attributes:
        edges: Runs at the beginning and the end.
        begin: First token of the first unit.
        unit: Tokens in a unit; divides the block size.
        blocks: Block of each unit, `[num_units]`.
        places: Index of each unit in its block, `[num_units]`.
    """

    edges: tuple[Run, ...]
    begin: int
    unit: int
    blocks: Integers
    places: Integers

    @property
    def end(self) -> int:
        """First token after the last unit."""
        return self.begin + self.unit * len(self.blocks)

    def token_slots(self) -> tuple[Integers, Integers]:
        """Return block and offset in the block of each token of the units."""
        return np.repeat(self.blocks, self.unit), (
            self.places[:, None] * self.unit + np.arange(self.unit)
        ).reshape(-1)


def find_runs(slots: Integers, block_size: int) -> SlotRuns:
    """Split a chunk into runs.

    Engines fill whole blocks, so a unit is usually a block; at both ends of a chunk a block may be
    cut. Slots in arbitrary order result in units of one token.

    Args:
        slots: At least one, all valid.
        block_size: Tokens in a block.
    """
    if block_size == 1:
        return SlotRuns((), 0, 1, slots, np.zeros_like(slots))
    breaks = np.flatnonzero((slots[1:] != slots[:-1] + 1) | (slots[1:] % block_size == 0)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(starts, append=len(slots))
    firsts = slots[starts]
    inner = slice(1, len(starts) - 1)
    unit = int(np.gcd.reduce(np.concatenate(([block_size], firsts[inner], lengths[inner]))))
    fits = (firsts % unit == 0) & (lengths % unit == 0)
    low, high = int(not fits[0]), len(starts) - int(len(starts) > 1 and not fits[-1])
    edges = tuple(
        Run(
            int(starts[i]),
            int(firsts[i]) // block_size,
            int(firsts[i]) % block_size,
            int(lengths[i]),
        )
        for i in (0, -1)
        if not fits[i]
    )
    begin = int(starts[low]) if low < len(starts) else len(slots)
    end = int(starts[high]) if high < len(starts) else len(slots)
    heads = slots[begin:end:unit]
    return SlotRuns(
        edges[: len(starts)], begin, unit, heads // block_size, heads % block_size // unit
    )
