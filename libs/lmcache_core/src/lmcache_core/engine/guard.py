"""Handles failures inside the cache: raise to the serving engine, or turn into a miss
(`error_handling`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lmcache_core.telemetry import FAILED_CALLS_TOTAL, Counters

logger = logging.getLogger(__name__)

CallGuard = Callable[[str], AbstractContextManager[object]]
"""Returns a context manager for one call of that name: a `DegradingGuard` or `nullcontext`."""


class DegradingGuard:
    """Ends a call without raising, logged and counted, whatever failed in it.

    This is one of the few places where any exception is caught: the degrading wrapper.

    Args:
        counters: Counters for failed calls, by operation.
        raised: Exceptions that are raised anyway; by default wrong arguments (`ValueError`).
    """

    def __init__(
        self, counters: Counters, raised: tuple[type[Exception], ...] = (ValueError,)
    ) -> None:
        self._counters = counters
        self._raised = raised

    @contextmanager
    def __call__(self, operation: str) -> Iterator[None]:
        """Guard one call."""
        try:
            yield
        except self._raised:
            raise
        except Exception:
            self._counters.add(FAILED_CALLS_TOTAL, 1, operation)
            logger.exception("call failed, continuing without the cache: operation=%s", operation)
