"""The guard around every slower tier: deadlines, breaker, price and observers.

The order is fixed: admission (the breaker; the price is queried beforehand), the deadline, the
observers, then the tier with its codec.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from weakref import WeakSet

from lmcache_core._typing import override
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.observers import (
    LogObserver,
    MetricsObserver,
    Observer,
    Operation,
    TierCall,
    TraceObserver,
)

logger = logging.getLogger(__name__)

_TROUBLE = frozenset({MissReason.UNAVAILABLE, MissReason.DEADLINE})
_MAX_EXPONENT = 32
MIN_BYTES_PER_S = 8 << 20
"""A tier that writes more slowly than this counts as hung."""
REMOVAL_S = 0.01
"""Extra time for the removal of one chunk."""
CLEAR_TIMEOUT_S = 300.0
READ_GRACE_S = 1.0
"""Extra time for a get, beyond its caller's limit, to hand over what it has."""
PROBE_INTERVAL = 16
"""One in this many reads that look too expensive is made anyway, within its deadline; otherwise a
tier that has recovered would never be noticed. If it finds nothing, so is the next.
"""


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """When calls of a tier time out, and when its breaker opens and closes.

    Attributes:
        num_failures: Consecutive failures that open the breaker.
        cool_down_s: Wait before the first probe; doubles with each probe that fails.
        slow_call_s: A call that its caller cancelled after at least this long counts as a failure.
        timeout_s: Longest wait for a call without a limit of its own; puts and removals get more
            time in proportion to their size.
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
    """Counts failures and decides which calls are admitted."""

    def __init__(self, name: str, options: GuardOptions, clock: Callable[[], float]) -> None:
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

    def admit(self) -> bool:
        """Return whether a call is admitted; after the cool-down one probe is."""
        if self._state is _State.CLOSED:
            return True
        if self._state is _State.PROBING or self._clock() < self._probe_at:
            return False
        self._state = _State.PROBING
        return True

    def succeeded(self) -> None:
        if self._state is not _State.CLOSED:
            logger.info("tier answers again: tier=%s", self._name)
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
                "tier bypassed until a probe succeeds: tier=%s failures=%d last=%r",
                self._name,
                self._num_failures,
                cause,
            )
        self._state = _State.OPEN
        self._num_openings += 1
        self._probe_at = self._clock() + wait_s

    def learned_nothing(self) -> None:
        """Record a call that proved nothing: if it was the probe, the next call becomes the
        probe.
        """
        if self._state is _State.PROBING:
            self._state = _State.OPEN


@dataclass(slots=True)
class _Attempt(TierCall):
    """An admitted call, and how the breaker is to judge it.

    Attributes:
        proves_nothing: The outcome says nothing about the tier.
        failure: Why the tier failed although the call returned; "" if it did not.
        is_hung: The guard's deadline ended it.
    """

    proves_nothing: bool = False
    failure: str = ""
    is_hung: bool = False


class Guard(StorageBackend):
    """A tier that may fail or hang: every call ends, failures become misses, and a tier that keeps
    failing is bypassed.

    Every call has a deadline. `UnavailableError` becomes misses, False or 0. A get that returns no
    chunk and at least one miss caused by the tier (`unavailable`, `deadline`) also counts as a
    failure, and so does a call that its caller cancelled after `slow_call_s`; a call with less time
    than that proves nothing. After several consecutive failures, calls return immediately, as
    misses with reason `breaker_open`, False or 0, until a probe succeeds.

    A single put that hangs opens a separate breaker for writes, which only a successful put closes:
    reads of such a tier may still work. A tier must be safe to abandon: it keeps a reference on
    whatever it still reads after a put was cancelled.

    An answer that did not need the device proves nothing about it, so it neither opens nor closes a
    breaker. A tier that knows its chunks (`num_written`) answers that way to `batched_contains`, to
    a put that writes none, and to a get or removal that finds none; every tier does for a call
    without keys.

    Args:
        backend: The tier; opened and closed with this one.
        is_priced: Measure the cost of reads, so that `num_worth` can tell whether one pays off. For
            readers that can compute the KV instead.
        observers: Notified of every admitted call; by default trace, log and metrics.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        backend: StorageBackend,
        options: GuardOptions | None = None,
        *,
        is_priced: bool = False,
        observers: Sequence[Observer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = backend.name
        self.wrapped = backend
        self._backend = backend
        self._options = options or GuardOptions()
        self._clock = clock
        self._breaker = _Breaker(backend.name, self._options, clock)
        self._writes = _Breaker(
            f"{backend.name} (writes)", replace(self._options, num_failures=1), clock
        )
        self._knows_chunks = backend.num_written is not None
        self._cost = ReadCost() if is_priced else None
        self._num_too_dear = self._num_withheld = 0
        self._asking_price: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._observers = (
            (TraceObserver(), LogObserver(), MetricsObserver())
            if observers is None
            else tuple(observers)
        )

    def __repr__(self) -> str:
        return f"Guard({self._backend!r})"

    @property
    @override
    def is_bypassed(self) -> bool:
        return self._breaker.is_open or self._writes.is_open

    @override
    def num_worth(self, num_chunks: int, limit_s: float, recompute_s: float | None = None) -> int:
        if self._cost is None or not num_chunks or self._breaker.is_open:
            # While the tier is bypassed, the breaker decides which read is a probe.
            return num_chunks
        num = self._cost.num_within(num_chunks, limit_s)
        expected_s = self._cost.expected_s(num) or 0.0
        if recompute_s is not None and expected_s > num * recompute_s:
            num = 0
        if num == 0:
            self._num_too_dear += 1
            self._num_withheld += 1
            if self._num_withheld < PROBE_INTERVAL:
                return 0
            self._num_withheld = 0
            if (reader := asyncio.current_task()) is not None:
                self._asking_price.add(reader)  # others may read meanwhile
            return num_chunks
        return num

    @override
    async def open(self) -> None:
        await self._backend.open()

    @override
    async def close(self) -> None:
        await self._backend.close()

    @override
    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool] | None:
        found = self._backend.contains_now(keys)
        return [False] * len(keys) if found and self._breaker.is_open else found

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if keys and self._breaker.admit():
            async with self._attempt("contains", keys, self._options.timeout_s) as attempt:
                found = await self._backend.batched_contains(keys)
                attempt.num_chunks = sum(found)
                attempt.proves_nothing = self._knows_chunks
                return found
        return [False] * len(keys)

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        if not keys:
            return []
        reader = asyncio.current_task()
        is_asking_price = reader in self._asking_price
        if reader is not None:
            self._asking_price.discard(reader)
        if not self._breaker.admit():
            return [Miss(MissReason.BREAKER_OPEN)] * len(keys)
        results: list[Result] = [Miss(MissReason.UNAVAILABLE)] * len(keys)
        limit_s = (
            self._options.timeout_s if timeout_s is None else max(0.0, timeout_s) + READ_GRACE_S
        )
        began = self._clock()
        try:
            async with self._attempt("get", keys, limit_s) as attempt:
                results = await self._backend.batched_get(keys, allocate, timeout_s)
                self._judge_get(attempt, results, timeout_s)
        except asyncio.CancelledError:
            # The caller gave up. If its time was over, the tier overran its limit.
            elapsed_s = self._clock() - began
            if self._cost is not None and timeout_s is not None and elapsed_s >= timeout_s:
                self._cost.observe(0, 0, elapsed_s)
            raise
        if self._cost is not None and (attempt.num_chunks or MissReason.DEADLINE in attempt.misses):
            self._cost.observe(attempt.num_chunks, attempt.num_bytes, self._clock() - began)
        elif is_asking_price:  # a tier that lacks the chunks has told no price
            self._num_withheld = PROBE_INTERVAL - 1
        return results

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks; after a put that hung, those that the tier holds by now are True."""
        kept = [False] * len(chunks)
        if not chunks or not self._writes.admit():
            return kept
        keys = [chunk.key for chunk in chunks]
        limit_s = self._options.timeout_s + sum(c.num_bytes for c in chunks) / MIN_BYTES_PER_S
        try:
            if self._breaker.admit():
                async with self._attempt("put", keys, limit_s) as attempt:
                    num_written = self._backend.num_written
                    kept = await self._backend.batched_put(chunks)
                    attempt.proves_nothing = (
                        self._knows_chunks and self._backend.num_written == num_written
                    )
                    if not attempt.proves_nothing:
                        attempt.num_chunks = sum(kept)
                        attempt.num_bytes = sum(
                            chunk.num_bytes for chunk, has in zip(chunks, kept, strict=True) if has
                        )
                        self._writes.succeeded()
                if attempt.is_hung:
                    self._writes.failed(attempt.failure)
                    kept = await self.batched_contains(keys)
        finally:
            self._writes.learned_nothing()
        return kept

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        if not keys:
            return 0
        limit_s = self._options.timeout_s + REMOVAL_S * len(keys)
        return await self._remove(
            "remove", keys, limit_s, lambda: self._backend.batched_remove(keys)
        )

    @override
    async def clear(self, tenant: str | None = None) -> int:
        return await self._remove("clear", (), CLEAR_TIMEOUT_S, lambda: self._backend.clear(tenant))

    @override
    def stats(self) -> dict[str, int]:
        """Return the figures of the tier and the observers, whether the tier or its writes are
        bypassed, how often that began, and how many reads looked too expensive.
        """
        figures = self._backend.stats() | {
            "breaker_open": int(self.is_bypassed),
            "breaker_openings": self._breaker.num_opened + self._writes.num_opened,
        }
        if self._cost is not None:
            figures["reads_too_dear"] = self._num_too_dear
        for observer in self._observers:
            figures |= observer.stats()
        return figures

    def _judge_get(
        self, attempt: _Attempt, results: Sequence[Result], timeout_s: float | None
    ) -> None:
        chunks = [result for result in results if isinstance(result, Chunk)]
        misses = Counter(result.reason for result in results if isinstance(result, Miss))
        attempt.num_chunks = len(chunks)
        attempt.num_bytes = sum(chunk.num_bytes for chunk in chunks)
        attempt.misses = misses
        if chunks:
            return
        trouble = [reason for reason in misses if reason in _TROUBLE]
        is_short = (
            trouble == [MissReason.DEADLINE]
            and timeout_s is not None
            and timeout_s < self._options.slow_call_s
        )
        if not trouble:
            attempt.proves_nothing = self._knows_chunks
        elif is_short:
            attempt.proves_nothing = True
        else:
            attempt.failure = trouble[0].value

    async def _remove(
        self,
        operation: Operation,
        keys: Sequence[ChunkKey],
        limit_s: float,
        remove: Callable[[], Awaitable[int]],
    ) -> int:
        if self._breaker.admit():
            async with self._attempt(operation, keys, limit_s) as attempt:
                attempt.num_chunks = await remove()
                attempt.proves_nothing = self._knows_chunks and not attempt.num_chunks
                return attempt.num_chunks
        return 0

    @asynccontextmanager
    async def _attempt(
        self, operation: Operation, keys: Sequence[ChunkKey], limit_s: float
    ) -> AsyncIterator[_Attempt]:
        """Run the body with a deadline of `limit_s` seconds, notify the observers, and judge the
        outcome; swallows `UnavailableError`.
        """
        attempt = _Attempt(self.name, operation, keys)
        began = self._clock()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                with self._observed(attempt):
                    yield attempt
        except (UnavailableError, TimeoutError) as exc:
            attempt.is_hung = limit.expired()
            attempt.failure = (
                f"no answer within {limit_s:.1f} s"
                if attempt.is_hung
                else str(exc) or type(exc).__name__
            )
            self._breaker.failed(attempt.failure)
        except asyncio.CancelledError:
            if self._clock() - began >= self._options.slow_call_s:
                self._breaker.failed("cancelled by its caller")
            else:
                self._breaker.learned_nothing()
            raise
        except BaseException:
            self._breaker.learned_nothing()
            raise
        else:
            if attempt.failure:
                self._breaker.failed(attempt.failure)
            elif attempt.proves_nothing:
                self._breaker.learned_nothing()
            else:
                self._breaker.succeeded()

    @contextmanager
    def _observed(self, call: TierCall) -> Iterator[None]:
        began = self._clock()
        try:
            with ExitStack() as contexts:
                for observer in self._observers:
                    contexts.enter_context(observer.during(call))
                yield
        except BaseException as exc:
            call.error = type(exc).__name__
            raise
        finally:
            call.seconds = self._clock() - began
            for observer in self._observers:
                observer.ended(call)


DECAY = 0.9
"""Weight of an observation relative to the next one: about the last ten count."""
MIN_OBSERVATIONS = 6
"""More than the consecutive failures that open a breaker: a tier that hangs from the start is left
to the breaker, a slow one is handled by price.
"""
RECOVERED_FACTOR = 4
NUM_RECOVERED = 2
"""`NUM_RECOVERED` consecutive reads, each `RECOVERED_FACTOR` times cheaper than expected, mean that
the tier has changed; earlier observations are discarded.
"""


class ReadCost:
    """Learns the cost of reading from one tier."""

    def __init__(self) -> None:
        self._mean_chunk_bytes = 0.0
        self._num_observed = 0
        self._num_cheap = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_chunks: int, num_bytes: int, elapsed_s: float) -> None:
        """Learn from a read of `num_chunks` chunks and `num_bytes` bytes (0 if it was abandoned)
        that took `elapsed_s`.
        """
        expected_s = self._seconds(num_bytes)
        is_cheap = (
            num_chunks > 0 and expected_s is not None and elapsed_s * RECOVERED_FACTOR < expected_s
        )
        self._num_cheap = self._num_cheap + 1 if is_cheap else 0
        if self._num_cheap == NUM_RECOVERED:
            self._num_observed = self._num_cheap = 0
            self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._num_observed += 1
        self._weight = self._weight * DECAY + 1
        self._x = self._x * DECAY + num_bytes
        self._y = self._y * DECAY + elapsed_s
        self._xx = self._xx * DECAY + float(num_bytes) * num_bytes
        self._xy = self._xy * DECAY + num_bytes * elapsed_s
        if num_chunks:
            mean = num_bytes / num_chunks
            self._mean_chunk_bytes = (
                mean
                if self._mean_chunk_bytes == 0
                else DECAY * self._mean_chunk_bytes + (1 - DECAY) * mean
            )

    def expected_s(self, num_chunks: int) -> float | None:
        """Return the expected seconds for reading `num_chunks`; None while too little is known."""
        return self._seconds(num_chunks * self._mean_chunk_bytes)

    def num_within(self, num_chunks: int, limit_s: float) -> int:
        """Return how many of `num_chunks`, from the first, a read can bring within `limit_s`; all
        while too little is known.
        """
        return bisect_right(
            range(1, num_chunks + 1), limit_s, key=lambda num: self.expected_s(num) or 0.0
        )

    def _seconds(self, num_bytes: float) -> float | None:
        if self._num_observed < MIN_OBSERVATIONS:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        covariance = self._xy / self._weight - mean_x * mean_y
        slope = (
            max(0.0, covariance / variance)
            if variance > (mean_x * 1e-3) ** 2 and variance > 0
            else 0.0
        )
        if slope == 0.0 and mean_x > 0:
            # Reads of one size cannot tell latency from bandwidth: count all of it as bandwidth
            # beyond that size, as latency below.
            return mean_y * max(1.0, num_bytes / mean_x)
        return max(0.0, mean_y - slope * mean_x) + slope * num_bytes
