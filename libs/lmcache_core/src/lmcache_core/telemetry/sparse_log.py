"""Log lines that a client could trigger at will: at most one of a kind per interval."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 60.0


class SparseLog:
    """Writes the first line of a kind, and the next one after `interval_s` at the earliest, with
    the number of lines omitted in between.

    A kind is a message before its arguments are filled in; there are as many as call sites. Not
    thread-safe.

    Args:
        clock: Seconds, monotonic.
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
        """Log the message, or count it as omitted."""
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
