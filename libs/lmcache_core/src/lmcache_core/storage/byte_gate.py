"""A bound on bytes in use at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteGate:
    """Lets users in, first come first served, as long as what they use together is within the
    bound. On one event loop.

    Args:
        max_bytes: The bound. A user that alone needs more is let in when nobody else is.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @asynccontextmanager
    async def using(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until so many bytes may be used; they are given back at the end."""
        taken = min(num_bytes, self._max_bytes)
        if self._waiting or self.used_bytes + taken > self._max_bytes:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((taken, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it had come in that moment
                    self._give_back(taken)
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
