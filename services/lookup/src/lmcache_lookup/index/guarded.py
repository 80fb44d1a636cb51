"""A circuit breaker around an index: while it is away, callers are told so at once instead of
each waiting for its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import Holder
from lmcache_core.wire.backoff import Backoff
from lmcache_servicekit.errors import StoreRefusedError
from typing_extensions import override

from lmcache_lookup.index.base import (
    ClaimedElsewhereError,
    EventBatch,
    IndexStats,
    InstanceStatus,
    LeaseClaim,
    LeaseState,
    LookupIndex,
)

FAILURES_BEFORE_PAUSE: Final = 3
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
REFUSAL_COUNTS_S: Final = 60.0

T = TypeVar("T")


class GuardedIndex(LookupIndex):
    """Passes calls on; after three failures in a row none for a while, twice as long after each
    further one, up to two seconds.

    A refusal is an answer: it holds no call back. `ping` is passed on always, and its success lets
    calls through again. It fails while leases or events are refused, since what is known goes stale
    then.

    Args:
        inner: The index that may be away.
        backoff: When to try again.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        inner: LookupIndex,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, time.monotonic)
        self._clock = clock
        self._num_failures = 0
        self._refused: dict[str, tuple[StoreRefusedError, float]] = {}
        self.name = inner.name
        self.where = inner.where

    @override
    async def open(self) -> None:
        await self._inner.open()

    @override
    async def close(self) -> None:
        await self._inner.close()

    @override
    async def ping(self) -> None:
        """Ask, even while other calls are held back."""
        await self._watch(self._inner.ping())
        for error, until in self._refused.values():
            if self._clock() < until:
                raise error

    @override
    async def renew(self, owner: str, claim: LeaseClaim) -> LeaseState:
        self._check()
        return await self._note_refusals("renew", self._inner.renew(owner, claim))

    @override
    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        self._check()
        return await self._watch(self._inner.end(owner, instance, incarnation))

    @override
    async def apply(self, owner: str, batch: EventBatch) -> LeaseState:
        self._check()
        return await self._note_refusals("apply", self._inner.apply(owner, batch))

    @override
    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        self._check()
        return await self._watch(self._inner.holders(tenant, chunk_ids))

    @override
    async def instances(self, owner: str) -> list[InstanceStatus]:
        self._check()
        return await self._watch(self._inner.instances(owner))

    @override
    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        self._check()
        return await self._watch(self._inner.evict(tenant, chunk_ids))

    @override
    async def clear(self, tenant: str) -> None:
        self._check()
        await self._watch(self._inner.clear(tenant))

    @override
    async def sweep(self) -> int:
        return 0 if self._backoff.wait_s > 0 else await self._watch(self._inner.sweep())

    @override
    async def stats(self, tenant: str) -> IndexStats:
        self._check()
        return await self._watch(self._inner.stats(tenant))

    @override
    async def tenants(self) -> list[str]:
        self._check()
        return await self._watch(self._inner.tenants())

    def _check(self) -> None:
        if self._backoff.wait_s > 0:
            raise UnavailableError(
                f"the {self.name} index is away; next try in {self._backoff.wait_s:.1f} s"
            )

    async def _note_refusals(self, kind: str, call: Awaitable[T]) -> T:
        """Remember a refused write until one of its kind is taken, or none has been tried for a
        minute.
        """
        try:
            result = await self._watch(call)
        except StoreRefusedError as exc:
            self._refused[kind] = (exc, self._clock() + REFUSAL_COUNTS_S)
            raise
        self._refused.pop(kind, None)
        return result

    async def _watch(self, call: Awaitable[T]) -> T:
        try:
            result = await call
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
