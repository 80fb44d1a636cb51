"""Memory that clients of earlier starts may still write to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lmcache_core.memory import MemoryObj
from lmcache_core.memory.arena_locks import forget_generation, is_over

logger = logging.getLogger(__name__)


class EarlierGenerations:
    """Holds what was lent when earlier starts ended, until their clients are gone.

    Args:
        directory: Where the arena is.
        lent: The memory by generation; the references pass to this object.
        flush: Writes down that memory is free.
    """

    def __init__(
        self, directory: Path, lent: Mapping[int, Sequence[MemoryObj]], flush: Callable[[], None]
    ) -> None:
        self._directory = directory
        self._lent = dict(lent)
        self._flush = flush

    @property
    def num_bytes(self) -> int:
        """What they hold of the arena."""
        return sum(
            memory.metadata.phy_size for memories in self._lent.values() for memory in memories
        )

    async def look(self) -> None:
        """Give back the memory of those whose clients are gone; to be called every second or so."""
        for generation in [
            generation for generation in self._lent if is_over(self._directory, generation)
        ]:
            memories = self._lent.pop(generation)
            for memory in memories:
                memory.ref_count_down()
            self._flush()  # before its file goes: a generation without one is not known to be over
            forget_generation(self._directory, generation)
            logger.info(
                "the last client of generation %016x is gone: %d extents are free again",
                generation,
                len(memories),
            )

    def close(self) -> None:
        """Give everything back: this process ends. Idempotent."""
        lent, self._lent = self._lent, {}
        for memories in lent.values():
            for memory in memories:
                memory.ref_count_down()
