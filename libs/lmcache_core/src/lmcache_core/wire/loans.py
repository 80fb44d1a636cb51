"""Chunks that stay where they are while movers of clients read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk
from lmcache_core.wire.messages import Loan

MAX_LOANS: Final = 64
"""Of one connection."""


class Lender(Protocol):
    """What makes memory of this process readable for movers elsewhere."""

    @property
    def blob(self) -> bytes:
        """How they reach it; empty while they cannot."""

    def lend(self, memory: MemoryObj) -> int | None:
        """Return where they read this memory, until `take_back`; None if they cannot."""

    def take_back(self, memory: MemoryObj) -> None:
        """End a loan."""


class Loans:
    """The loans of one connection. Each holds its chunk until it is given back, or its time is up:
    a mover that still reads then gets what is there next, and its digest tells.

    Args:
        limit_s: How long a payload of a size may be lent.
    """

    def __init__(self, lender: Lender, limit_s: Callable[[int], float]) -> None:
        self._lender = lender
        self._limit_s = limit_s
        self._held: dict[int, tuple[Chunk, asyncio.TimerHandle]] = {}
        self._num_lent = 0

    def lend(self, chunk: Chunk) -> Loan | None:
        """Lend a chunk, and take a reference on it; None if it cannot be lent."""
        if len(self._held) >= MAX_LOANS:
            return None
        address = self._lender.lend(chunk.memory)
        if address is None:
            return None
        self._num_lent += 1
        number = self._num_lent
        limit_s = self._limit_s(chunk.memory.get_size())
        timer = asyncio.get_running_loop().call_later(limit_s, self.take_back, [number])
        chunk.memory.ref_count_up()
        self._held[number] = chunk, timer
        return Loan(number, address, chunk.head)

    def take_back(self, numbers: Sequence[int]) -> None:
        """End loans; those that have ended are left out."""
        for number in numbers:
            if number in self._held:
                chunk, timer = self._held.pop(number)
                timer.cancel()
                self._lender.take_back(chunk.memory)
                chunk.release()

    def close(self) -> None:
        """End all loans."""
        self.take_back(list(self._held))
