"""A bound on bytes in use at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteGate:
    """Admits requests in order of arrival while the bytes in use stay within a bound. For one event
    loop.

    Args:
        max_bytes: The bound. A request larger than the bound is admitted only when the gate is
            idle.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @asynccontextmanager
    async def using(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until `num_bytes` may be used, and release them at the end of the context."""
        taken = min(num_bytes, self._max_bytes)
        if self._waiting or self.used_bytes + taken > self._max_bytes:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((taken, turn))
            try:
                await turn
            except asyncio.CancelledError:
                # Admitted just before the cancellation, or in front of smaller requests.
                self._give_back(0 if turn.cancelled() else taken)
                raise
        else:
            self.used_bytes += taken
        try:
            yield
        finally:
            self._give_back(taken)

    def _give_back(self, taken: int) -> None:
        self.used_bytes -= taken
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if self.used_bytes + wanted > self._max_bytes:
                    return
                self.used_bytes += wanted
                turn.set_result(None)
            self._waiting.popleft()
