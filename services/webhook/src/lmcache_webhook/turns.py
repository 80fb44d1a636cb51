"""Turns for reviews, one at a time, shared fairly among callers.

Anyone who reaches the port may ask for reviews, and the API server must not wait behind them. Each
review costs as many bytes as its body has. As in fair queueing, a caller's review starts, in
virtual time, where its last one finished, or now; the one that finishes first is next. So the
usual pod of a few KiB waits for the review underway, and not for large ones of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from lmcache_core.errors import CapacityError

LEAST_COST: Final = 4096
"""Cost in bytes of a smaller body."""
MAX_CALLERS: Final = 4096
"""Callers whose last finish is kept; beyond it those that are due no later than now are forgotten,
then all.
"""


@dataclass(eq=False)
class _Waiter:
    start: int
    finish: int
    num_bytes: int
    turn: asyncio.Future[None]


class FairTurns:
    """Gives turns, within a bound on the bodies of all that have one or wait."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._waiting: list[_Waiter] = []
        self._current: _Waiter | None = None
        self._now = 0
        self._finish: dict[str, int] = {}

    @asynccontextmanager
    async def turn(self, caller: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn, and keep it until the context ends.

        Args:
            caller: Its address.
            num_bytes: Length of the body.

        Raises:
            CapacityError: There is no room for the body, or there was none left when a review that
                comes sooner asked for it.
        """
        start = max(self._now, self._finish.get(caller, 0))
        finish = start + max(num_bytes, LEAST_COST)
        waiter = _Waiter(start, finish, num_bytes, asyncio.get_running_loop().create_future())
        self._make_room(waiter)
        self._finish[caller] = finish
        if len(self._finish) > MAX_CALLERS:
            due = {each: last for each, last in self._finish.items() if last > self._now}
            self._finish = due if len(due) <= MAX_CALLERS else {}
        self._num_bytes += num_bytes
        self._waiting.append(waiter)
        self._begin_next()
        try:
            await waiter.turn
            yield
        finally:
            if waiter is self._current:
                self._current = None
            self._leave(waiter)
            self._begin_next()

    def _make_room(self, newcomer: _Waiter) -> None:
        while self._num_bytes + newcomer.num_bytes > self._max_bytes:
            last = max(self._waiting, key=lambda waiter: waiter.finish, default=newcomer)
            if last.finish <= newcomer.finish:
                raise CapacityError("too many large reviews wait")
            self._leave(last)
            last.turn.set_exception(CapacityError("too many large reviews wait"))

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        self._num_bytes -= waiter.num_bytes
        waiter.num_bytes = 0

    def _begin_next(self) -> None:
        if self._current is not None:
            return
        if not self._waiting:
            self._now = 0
            self._finish.clear()
            return
        self._current = min(self._waiting, key=lambda waiter: waiter.finish)
        self._waiting.remove(self._current)
        self._now = max(self._now, self._current.start)
        if not self._current.turn.done():
            self._current.turn.set_result(None)
