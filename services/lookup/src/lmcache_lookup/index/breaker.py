"""A circuit breaker: while Redis is unavailable, calls fail immediately instead of after
timeouts.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from lmcache_core.errors import UnavailableError
from lmcache_core.wire.backoff import Backoff
from lmcache_servicekit.errors import StoreRefusedError

from lmcache_lookup.index.base import ClaimedElsewhereError

FAILURES_BEFORE_PAUSE: Final = 3
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
REFUSAL_COUNTS_S: Final = 60.0

T = TypeVar("T")


class IndexBreaker:
    """Stops calls for a while after three consecutive failures, twice as long after each further
    one, up to two seconds.

    A refusal is an answer and stops no calls. `ping` is always sent, and its success admits calls
    again. It fails while leases or events are refused, since the index becomes outdated then.
    """

    def __init__(
        self, name: str, backoff: Backoff | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, clock)
        self._clock = clock
        self._num_failures = 0
        self._refused: dict[str, tuple[StoreRefusedError, float]] = {}

    @property
    def is_open(self) -> bool:
        """Whether calls are currently stopped."""
        return self._backoff.wait_s > 0

    async def ping(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call even while others are stopped.

        Raises:
            UnavailableError: It failed, or writes were refused within the last minute.
        """
        await self._watch(call)
        for error, until in self._refused.values():
            if self._clock() < until:
                raise error

    async def call(self, call: Callable[[], Awaitable[T]], write: str = "") -> T:
        """Make a call, unless calls are stopped.

        Args:
            write: Kind of write, if `ping` must fail after a refusal until a write of this kind
                succeeds.

        Raises:
            UnavailableError: It failed, or calls are stopped.
        """
        if self.is_open:
            raise UnavailableError(
                f"the {self._name} index is unavailable; next try in {self._backoff.wait_s:.1f} s"
            )
        try:
            result = await self._watch(call)
        except StoreRefusedError as exc:
            if write:
                self._refused[write] = (exc, self._clock() + REFUSAL_COUNTS_S)
            raise
        self._refused.pop(write, None)
        return result

    async def _watch(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await call()
        except (ClaimedElsewhereError, StoreRefusedError):
            self._went_well()
            raise
        except UnavailableError:
            self._num_failures += 1
            if self._num_failures >= FAILURES_BEFORE_PAUSE:
                self._backoff.failed()
            raise
        self._went_well()
        return result

    def _went_well(self) -> None:
        self._num_failures = 0
        self._backoff.succeeded()
