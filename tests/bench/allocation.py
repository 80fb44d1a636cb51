"""What an allocation costs: one object freed and another one taken, among 1,000 and among
100,000 live ones.
"""

from __future__ import annotations

import mmap
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.memory import ALIGN_BYTES, ArenaAllocator, ArenaMemoryObj

from tests.bench.measure import timed

NUM_LIVE = (1_000, 100_000)
NUM_PAIRS = 4_000
MIXED_BYTES = tuple(ALIGN_BYTES * units - 100 for units in (1, 2, 3, 5, 8, 13, 21))
"""Seven sizes, Fibonacci's, so that what remains of a cut extent is itself of use."""
EQUAL_BYTES = (8 * ALIGN_BYTES,)
"""As when all chunks are whole."""


@dataclass(frozen=True)
class PairCost:
    """One row: an allocate and a free, and what the same costs among fewer objects.

    Attributes:
        name: Which sizes.
        num_live: Objects that are out meanwhile.
        seconds: Each round of `NUM_PAIRS`.
        among_fewer: The row to compare with; None for the first one.
    """

    name: str
    num_live: int
    seconds: tuple[float, ...]
    among_fewer: PairCost | None = None

    @property
    def pair_us(self) -> float:
        """Median, microseconds a pair."""
        return statistics.median(self.seconds) / NUM_PAIRS * 1e6

    @property
    def spread_us(self) -> tuple[float, float]:
        """Fastest and slowest round, microseconds a pair."""
        return min(self.seconds) / NUM_PAIRS * 1e6, max(self.seconds) / NUM_PAIRS * 1e6

    @property
    def ratio(self) -> float | None:
        """How many times the cost among fewer objects; a cost in O(log n) grows to 1.7 times
        from 1,000 to 100,000, beside cache misses.
        """
        return None if self.among_fewer is None else self.pair_us / self.among_fewer.pair_us


def allocation_rows() -> list[PairCost]:
    """Mixed sizes in memory that is full of holes, and equal sizes; takes a few seconds."""
    rows = []
    for name, sizes in (("mixed sizes", MIXED_BYTES), ("equal sizes", EQUAL_BYTES)):
        few = pair_cost(name, NUM_LIVE[0], sizes)
        rows += [few, pair_cost(name, NUM_LIVE[1], sizes, few)]
    return rows


def pair_cost(
    name: str, num_live: int, sizes: Sequence[int], among_fewer: PairCost | None = None
) -> PairCost:
    """Fill an arena to twice that many objects, free a random half, then measure pairs at random
    places.
    """
    rng = random.Random(num_live)
    # The memory is never touched: the books are what is measured.
    mapping = mmap.mmap(
        -1, 2 * num_live * (max(sizes) + ALIGN_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    arena = ArenaAllocator(memoryview(mapping))
    live = [_take(arena, rng.choice(sizes)) for _ in range(2 * num_live)]
    rng.shuffle(live)
    while len(live) > num_live:
        live.pop().ref_count_down()
    steps = [(rng.randrange(num_live), rng.choice(sizes)) for _ in range(NUM_PAIRS)]

    def work(turn: int) -> None:
        for place, size in steps:
            live[place].ref_count_down()
            live[place] = _take(arena, size)

    seconds = timed(work)
    arena.check_integrity()
    return PairCost(name, num_live, seconds, among_fewer)


def _take(arena: ArenaAllocator, size: int) -> ArenaMemoryObj:
    memory_obj = arena.allocate((size,), "uint8")
    assert memory_obj is not None, "the arena is large enough for all"
    return memory_obj


if __name__ == "__main__":
    for row in allocation_rows():
        low, high = row.spread_us
        ratio = "" if row.ratio is None else f", {row.ratio:.2f} times the cost among {NUM_LIVE[0]}"
        print(
            f"{row.name}, {row.num_live} live: {row.pair_us:.2f} us a pair ({low:.2f} ..."
            f" {high:.2f}){ratio}"
        )
