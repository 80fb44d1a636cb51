"""What becomes of a failure inside the cache: raised to the serving engine, or a miss
(`error_handling`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from lmcache_core._typing import override
from lmcache_core.telemetry import FAILED_CALLS_TOTAL, Counters

logger = logging.getLogger(__name__)


class CallGuard(Protocol):
    """Stands around every call of the engine; chosen once, by `error_handling`."""

    def __call__(self, operation: str) -> AbstractContextManager[None]:
        """Return a context for one call of that name."""


class RaisingGuard(CallGuard):
    """Lets everything through."""

    @override
    def __call__(self, operation: str) -> AbstractContextManager[None]:
        return nullcontext()


class DegradingGuard(CallGuard):
    """Ends the call quietly, logged and counted, whatever failed in it.

    This is the degrading wrapper among the places where any exception is caught.

    Args:
        counters: Where failed calls are counted, by operation.
        raised: What is raised all the same; by default wrong arguments (`ValueError`).
    """

    def __init__(
        self, counters: Counters, raised: tuple[type[Exception], ...] = (ValueError,)
    ) -> None:
        self._counters = counters
        self._raised = raised

    @override
    @contextmanager
    def __call__(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._raised:
            raise
        except Exception:
            self._counters.add(FAILED_CALLS_TOTAL, 1, operation)
            logger.exception("%s failed; the serving engine goes on without the cache", operation)
