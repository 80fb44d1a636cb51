"""Reads between two movers, either of which is stopped or killed in the middle, and what becomes of
the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from lmcache_core.errors import UnavailableError
from lmcache_core.memory.base import MemoryObj
from lmcache_core.mover import Piece

from tests.transports.movers import Node

PIECE_BYTES = 4 << 20
NUM_PIECES = 8
STAMP = bytes([0xA5]) * PIECE_BYTES
HURT_TIMEOUT_S = 0.05
LONG_S = 120.0
"""Only a hang lasts so long."""
LATE_S = 2.0
"""A call may outlast its deadline by this much on a machine that does more than this."""
AFTERWARDS_S = 0.3
"""How long to wait for late bytes of a read that was given up, once its peer resumes."""


class Fault(NamedTuple):
    """A signal to the worker of one of the two movers."""

    side: str
    signal: int

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name} {self.side}"


FAULTS = tuple(
    Fault(side, number)
    for side in ("reader", "peer")
    for number in (signal.SIGSTOP, signal.SIGKILL)
)


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        ends: How reads ended, by fault.
        num_wrong: Reads that said they were filled, with other bytes.
        num_late: Reads that ended long after their deadline.
        overwritten_bytes: Of memory that was used again after a read that was hurt.
        lost_bytes: Of the arena, at the end.
        lives: Of the reader's mover and the peer's.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_late: int = 0
    overwritten_bytes: int = 0
    lost_bytes: int = 0
    lives: tuple[int, int] = (0, 0)


class Unowned:
    """Memory that the mover cannot own: it is free as soon as its read has ended for the caller."""

    def __init__(self, memory: MemoryObj) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def ref_count_up(self) -> None:
        """Do nothing."""

    def ref_count_down(self) -> None:
        """Do nothing."""


class Storm:
    """Reads again and again, into memory that is used again at once.

    Args:
        reader: Connected to its mover; its arena is empty.
        peer: Likewise.
        is_owned: False: without the rule that this is about.
    """

    def __init__(self, reader: Node, peer: Node, seed: int, is_owned: bool = True) -> None:
        self._reader, self._peer = reader, peer
        self._dice = random.Random(seed)
        self._is_owned = is_owned
        self._theirs = [peer.allocate(PIECE_BYTES) for _ in range(NUM_PIECES)]
        for memory in self._theirs:
            memory.byte_array[:] = self._dice.randbytes(PIECE_BYTES)
        self.outcome = Outcome()

    async def rage(self, num_reads: int, hurt_share: float) -> Outcome:
        """Read so many times, and hurt one of the movers in a part of them."""
        for _ in range(num_reads):
            is_hurt = self._dice.random() < hurt_share
            await self.read(self._dice.choice(FAULTS) if is_hurt else None)
        return await self.settle()

    async def settle(self) -> Outcome:
        """Wait until the movers own nothing, and release everything."""
        async with asyncio.timeout(LONG_S):
            while self._reader.client.given_up_bytes:
                await asyncio.sleep(0.02)
        for memory in self._theirs:
            memory.ref_count_down()
        self.outcome.lost_bytes = self._reader.memory.used_bytes
        self.outcome.lives = self._reader.client.num_lives, self._peer.client.num_lives
        return self.outcome

    async def read(self, fault: Fault | None) -> None:
        """Read once."""
        reader, peer = self._reader, self._peer
        await reader.attached()
        blob = await peer.attached()
        pieces = [reader.piece_from(peer, memory) for memory in self._theirs]
        asked: Sequence[Any] = pieces
        if not self._is_owned:
            asked = [Piece(address, cast("MemoryObj", Unowned(mine))) for address, mine in pieces]
        timeout_s = LONG_S if fault is None else HURT_TIMEOUT_S
        began = time.monotonic()
        reading = asyncio.create_task(reader.client.read(blob, asked, timeout_s))
        hurt = await self._hurt(fault)
        try:
            await reading
            is_filled = True
        except UnavailableError:
            is_filled = False
        self.outcome.num_late += time.monotonic() - began > timeout_s + LATE_S
        self.outcome.ends[f"{fault or 'unhurt'}: {'filled' if is_filled else 'failed'}"] += 1
        self.outcome.num_wrong += is_filled and any(
            bytes(piece.memory.byte_array) != bytes(memory.byte_array)
            for piece, memory in zip(pieces, self._theirs, strict=True)
        )
        for piece in pieces:
            piece.memory.ref_count_down()
        if fault is not None:
            await self._use_again(hurt if fault.signal == signal.SIGSTOP else 0)

    async def _hurt(self, fault: Fault | None) -> int:
        """Send a signal a moment later; return the process that got it."""
        if fault is None:
            return 0
        await asyncio.sleep(self._dice.uniform(0, HURT_TIMEOUT_S / 2))
        worker = (self._reader if fault.side == "reader" else self._peer).mover.worker
        os.kill(worker, fault.signal)
        return worker

    async def _use_again(self, stopped: int) -> None:
        """Fill all free memory, let what was stopped go on, and see whether it changes."""
        taken: list[MemoryObj] = []
        while (memory := self._reader.memory.allocate((PIECE_BYTES,), None)) is not None:
            memory.byte_array[:] = STAMP
            taken.append(memory)
        if stopped:
            with contextlib.suppress(ProcessLookupError):  # its supervisor has killed it
                os.kill(stopped, signal.SIGCONT)
        await asyncio.sleep(AFTERWARDS_S)
        for memory in taken:
            held = bytes(memory.byte_array)
            if held != STAMP:
                self.outcome.overwritten_bytes += PIECE_BYTES - held.count(STAMP[:1])
            memory.ref_count_down()
