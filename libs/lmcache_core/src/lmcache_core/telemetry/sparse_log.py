"""Log lines that a client could trigger at will: at most one of a kind in a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 60.0


class SparseLog:
    """Writes the first line of a kind, and after `interval_s` at the earliest the next, which then
    says how many were left out.

    A kind is a message before its arguments are filled in; there are as many as places that call
    this. Not thread-safe.

    Args:
        logger: Where lines go.
        interval_s: Shortest time between two lines of a kind, seconds.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}

    def log(self, level: int, message: str, *arguments: object) -> None:
        """Log it, or count it as left out."""
        now = self._clock()
        last, num_left_out = self._kinds.get(message, (float("-inf"), 0))
        if now - last < self._interval_s:
            self._kinds[message] = (last, num_left_out + 1)
            return
        self._kinds[message] = (now, 0)
        if num_left_out:
            message, arguments = (
                f"{message} (and %d more since the last such line)",
                (*arguments, num_left_out),
            )
        self._logger.log(level, message, *arguments)
