"""A tier that may fail or hang: every call ends, failures are misses, and while it keeps failing
it is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers.base import WrapperBackend, lister_of

logger = logging.getLogger(__name__)

_TROUBLE = frozenset({MissReason.UNAVAILABLE, MissReason.DEADLINE})
_MAX_EXPONENT = 32
MIN_BYTES_PER_S = 8 << 20
"""A tier that writes more slowly than this hangs, as far as its callers can tell."""
REMOVAL_S = 0.01
"""What the removal of one chunk may take."""
CLEAR_TIMEOUT_S = 300.0
READ_GRACE_S = 1.0
"""What a get may need beyond its caller's limit to give back what it has."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When a breaker opens and closes.

    Attributes:
        num_failures: Failures in a row that open it.
        cool_down_s: Wait before the first probe; doubles with each probe that fails.
        cool_down_cap_s: Longest wait.
        slow_call_s: A call that its caller gave up after at least this long counts as a failure.
        timeout_s: Longest wait for a call that has no limit of its caller's; what is put or removed
            adds to it by its size.
    """

    num_failures: int = 5
    cool_down_s: float = 0.5
    cool_down_cap_s: float = 30.0
    slow_call_s: float = 0.1
    timeout_s: float = 10.0


class _State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class _Breaker:
    """Counts failures and says who may pass."""

    def __init__(self, name: str, options: BreakerOptions, clock: Callable[[], float]) -> None:
        self._name = name
        self._options = options
        self._clock = clock
        self._state = _State.CLOSED
        self._num_failures = 0
        self._num_openings = 0
        self._probe_at = 0.0
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return self._state is not _State.CLOSED

    @property
    def now(self) -> float:
        return self._clock()

    def admit(self) -> bool:
        """Whether a call may go through; when the cool-down is over one probe may."""
        if self._state is _State.CLOSED:
            return True
        if self._state is _State.PROBING or self._clock() < self._probe_at:
            return False
        self._state = _State.PROBING
        return True

    def succeeded(self) -> None:
        if self._state is not _State.CLOSED:
            logger.info("tier %s answers again", self._name)
        self._state = _State.CLOSED
        self._num_failures = 0
        self._num_openings = 0

    def failed(self, cause: str) -> None:
        self._num_failures += 1
        if self._state is _State.OPEN or (
            self._state is _State.CLOSED and self._num_failures < self._options.num_failures
        ):
            return
        wait_s = min(
            self._options.cool_down_cap_s,
            self._options.cool_down_s * 2 ** min(self._num_openings, _MAX_EXPONENT),
        )
        if self._state is _State.CLOSED:
            self.num_opened += 1
            logger.warning(
                "tier %s is bypassed after %d failures, the last: %s",
                self._name,
                self._num_failures,
                cause,
            )
        self._state = _State.OPEN
        self._num_openings += 1
        self._probe_at = self._clock() + wait_s

    def gave_up(self) -> None:
        """The call told nothing: if it was the probe, the next call is."""
        if self._state is _State.PROBING:
            self._state = _State.OPEN


class _Attempt:
    """One call that was let through, and what became of it.

    Attributes:
        tells_nothing: It ended neither well nor badly.
        is_hung: It was ended by the deadline of the guard.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.tells_nothing = False
        self.is_hung = False
        self.cause = ""

    def fail(self, cause: str) -> None:
        self.has_failed = True
        self.cause = cause


class BreakerBackend(WrapperBackend):
    """Turns `UnavailableError` into misses, and after several failures in a row bypasses the tier
    until a probe succeeds.

    Every call has a deadline. A get that brings no chunk and a miss for want of the tier
    (`unavailable`, `deadline`) is a failure too, and so is a call that its caller gave up after
    `slow_call_s`; one whose caller had less time than that tells nothing. While open, calls return
    at once: misses with reason `breaker_open`, False, 0.

    One put that does not end opens a breaker for writes alone, which only a put closes: reads of
    such a tier may be sound. A tier must be safe to abandon: what it still reads after a cancelled
    put it keeps referenced.

    An answer that needed no device proves nothing about it, so it neither opens nor closes a
    breaker. A tier that lists its keys gives such answers to `batched_contains`, to a put that adds
    no chunk, and to a get or removal that finds none; every tier does so to a call without keys.

    Args:
        backend: What is wrapped.
        clock: Seconds, monotonic.
        options: When to open and close.
    """

    def __init__(
        self,
        backend: StorageBackend,
        clock: Callable[[], float] = time.monotonic,
        options: BreakerOptions | None = None,
    ) -> None:
        super().__init__(backend)
        self._options = options or BreakerOptions()
        self._breaker = _Breaker(backend.name, self._options, clock)
        self._writes = _Breaker(
            f"{backend.name} (writes)", replace(self._options, num_failures=1), clock
        )
        lister = lister_of(backend)
        self._lister: StorageBackend | None = lister if isinstance(lister, StorageBackend) else None

    @property
    def is_open(self) -> bool:
        """Whether the tier, or writes to it, are bypassed."""
        return self._breaker.is_open or self._writes.is_open

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        if not keys:
            return []
        if self._breaker.admit():
            async with self._attempt(self._options.timeout_s) as attempt:
                found = await self._backend.batched_contains(keys)
                attempt.tells_nothing = self._lister is not None
                return found
        return [False] * len(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        if not keys:
            return []
        if not self._breaker.admit():
            return [Miss(MissReason.BREAKER_OPEN)] * len(keys)
        results: list[Result] = [Miss(MissReason.UNAVAILABLE)] * len(keys)
        limit_s = (
            self._options.timeout_s if timeout_s is None else max(0.0, timeout_s) + READ_GRACE_S
        )
        async with self._attempt(limit_s) as attempt:
            results = await self._backend.batched_get(keys, allocate, timeout_s)
            trouble = [
                result.reason
                for result in results
                if isinstance(result, Miss) and result.reason in _TROUBLE
            ]
            is_short = (
                set(trouble) == {MissReason.DEADLINE}
                and timeout_s is not None
                and timeout_s < self._options.slow_call_s
            )
            if not any(isinstance(result, Chunk) for result in results):
                attempt.tells_nothing = is_short if trouble else self._lister is not None
                if trouble and not is_short:
                    attempt.fail(trouble[0].value)
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Keep chunks; of a put that hung, those that the tier has by then."""
        if not chunks:
            return []
        keys = [chunk.key for chunk in chunks]
        kept = [False] * len(chunks)
        if not self._writes.admit():
            return kept
        try:
            if self._breaker.admit():
                limit_s = (
                    self._options.timeout_s
                    + sum(chunk.num_bytes for chunk in chunks) / MIN_BYTES_PER_S
                )
                async with self._attempt(limit_s) as attempt:
                    known = (
                        kept if self._lister is None else await self._lister.batched_contains(keys)
                    )
                    kept = await self._backend.batched_put(chunks)
                    has_added = any(
                        is_kept and not was for is_kept, was in zip(kept, known, strict=True)
                    )
                    attempt.tells_nothing = self._lister is not None and not has_added
                    if not attempt.tells_nothing:
                        self._writes.succeeded()
                if attempt.is_hung:
                    self._writes.failed(attempt.cause)
                    kept = await self.batched_contains(keys)
        finally:
            self._writes.gave_up()
        return kept

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        if keys and self._breaker.admit():
            async with self._attempt(self._options.timeout_s + REMOVAL_S * len(keys)) as attempt:
                num_removed = await self._backend.batched_remove(keys)
                attempt.tells_nothing = self._lister is not None and not num_removed
                return num_removed
        return 0

    async def clear(self, tenant: str | None = None) -> int:
        """See `StorageBackend.clear`."""
        if self._breaker.admit():
            async with self._attempt(CLEAR_TIMEOUT_S) as attempt:
                num_removed = await self._backend.clear(tenant)
                attempt.tells_nothing = self._lister is not None and not num_removed
                return num_removed
        return 0

    def stats(self) -> dict[str, int]:
        """The backend's figures, whether the breaker is open now and how often it opened."""
        num_opened = self._breaker.num_opened + self._writes.num_opened
        return self._backend.stats() | {
            "breaker_open": int(self.is_open),
            "breaker_openings": num_opened,
        }

    @asynccontextmanager
    async def _attempt(self, limit_s: float) -> AsyncIterator[_Attempt]:
        """End the call inside after `limit_s` seconds, and judge it by how it ends; swallows
        `UnavailableError`.
        """
        attempt = _Attempt()
        began = self._breaker.now
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                yield attempt
        except (UnavailableError, TimeoutError) as exc:
            attempt.is_hung = limit.expired()
            attempt.cause = (
                f"no answer within {limit_s:.1f} s"
                if attempt.is_hung
                else str(exc) or type(exc).__name__
            )
            self._breaker.failed(attempt.cause)
        except asyncio.CancelledError:
            if self._breaker.now - began >= self._options.slow_call_s:
                self._breaker.failed("given up by its caller")
            else:
                self._breaker.gave_up()
            raise
        except BaseException:
            self._breaker.gave_up()
            raise
        else:
            if attempt.has_failed:
                self._breaker.failed(attempt.cause)
            elif attempt.tells_nothing:
                self._breaker.gave_up()
            else:
                self._breaker.succeeded()


def breaker_of(backend: StorageBackend) -> BreakerBackend | None:
    """The breaker among the wrappers of a tier."""
    while isinstance(backend, WrapperBackend):
        if isinstance(backend, BreakerBackend):
            return backend
        backend = backend.wrapped
    return None
