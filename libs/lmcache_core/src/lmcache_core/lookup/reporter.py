"""Keeps the lookup service informed of what one instance holds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup.client import LookupClient
from lmcache_core.lookup.messages import (
    MAX_EVENTS_PER_BATCH,
    EventOp,
    Holding,
    InstanceKind,
    StoreEvent,
    pack_ids,
    validate_tier,
)
from lmcache_core.names import validate_instance_id
from lmcache_core.wire.backoff import Backoff

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 3

_RESTART_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReporterTiming:
    """Timing and bounds of a reporter.

    Attributes:
        ttl_ms: The lease to request; None: the service's default. It is renewed three times within
            the lease that the service grants.
        gather_s: How long the first event waits for others, in seconds.
        retry_s: First wait after a failure; it doubles up to `max_retry_s`.
        max_retry_s: Longest wait after a failure or between two resyncs.
        max_pending: Bound on events that wait while the service is unavailable; beyond it a resync
            replaces them.
    """

    ttl_ms: int | None = None
    gather_s: float = 0.02
    retry_s: float = 0.25
    max_retry_s: float = 15.0
    max_pending: int = 65_536


class Outbox:
    """Numbered events of one incarnation that the service has not acknowledged, in order.

    It starts out needing a resync, because the service's state is unknown. While it needs one,
    events are not kept, since the announcement that follows covers everything.

    Args:
        max_pending: Bound on events apart from the announcement; exceeding it drops them all and
            requires a resync.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._announcement: deque[StoreEvent] = deque()
        self._pending: deque[StoreEvent] = deque()
        self._first_sequence = 0
        self._num_sent = 0
        self.incarnation = 0
        self.needs_resync = True
        self.num_overflows = 0

    @property
    def num_unacknowledged(self) -> int:
        """Events that have yet to be sent or acknowledged."""
        return len(self._announcement) + len(self._pending)

    def add(self, event: StoreEvent) -> None:
        """Append an event."""
        if self.needs_resync:
            return
        if len(self._pending) >= self._max_pending:
            self.num_overflows += 1
            self.lose()
            return
        self._pending.append(event)

    def lose(self) -> None:
        """Drop everything: the service needs a full announcement, by a higher incarnation."""
        self._announcement.clear()
        self._pending.clear()
        self._num_sent = 0  # answers to requests underway acknowledge nothing
        self.needs_resync = True

    def begin(self, incarnation: int) -> None:
        """Start an incarnation: keep events from now on. Call `announce` next, before any batch."""
        assert incarnation > self.incarnation, "incarnations only increase"
        self._announcement = deque()
        self._pending.clear()
        self._first_sequence = self._num_sent = 0
        self.incarnation = incarnation
        self.needs_resync = False

    def announce(self, announcement: deque[StoreEvent]) -> None:
        """Queue what was held at some time after `begin`, ahead of all events since."""
        assert self._num_sent == 0, "the announcement is sent first"
        if not self.needs_resync:  # too many events may have arrived since
            self._announcement = announcement

    def batch(self, max_events: int) -> tuple[int, list[StoreEvent]]:
        """Return the oldest events, which stay until they are acknowledged.

        Returns:
            The sequence number of the first, and at most `max_events` events.
        """
        events = list(
            itertools.islice(itertools.chain(self._announcement, self._pending), max_events)
        )
        self._num_sent = max(self._num_sent, len(events))
        return self._first_sequence, events

    def acknowledge(self, next_sequence: int) -> None:
        """Drop the events that the service has accepted. An impossible number means that it has
        lost its state: everything is dropped.
        """
        num_taken = next_sequence - self._first_sequence
        if not 0 <= num_taken <= self._num_sent:
            self.lose()
            return
        for _ in range(num_taken):
            (self._announcement or self._pending).popleft()
        self._first_sequence = next_sequence
        self._num_sent -= num_taken


class InstanceReporter:
    """Owns an instance's lease and the numbered events of its stores and removals.

    An unavailable service never affects the caller: no method raises for it or waits for it. Events
    wait, within bounds; if there are too many, or the service has missed some, the reporter takes a
    higher incarnation and announces everything again.

    All methods belong to the event loop that `open` ran on.

    Args:
        client: Must stay open as long as this object.
        snapshot: Returns everything that is held now, including what `stored` reported before.
            Called in a thread, because it may be long.

    Raises:
        ValueError: `instance_id` is malformed.
    """

    def __init__(
        self,
        client: LookupClient,
        instance_id: str,
        kind: InstanceKind,
        snapshot: Callable[[], Iterable[Holding]],
        timing: ReporterTiming | None = None,
    ) -> None:
        self._client = client
        self._instance_id = validate_instance_id(instance_id)
        self._kind = kind
        self._snapshot = snapshot
        self._timing = timing or ReporterTiming()
        self._outbox = Outbox(self._timing.max_pending)
        self._backoff = Backoff(self._timing.retry_s, self._timing.max_retry_s, time.monotonic)
        self._renew_at = self._lease_ends = float("-inf")
        self._last_incarnation = 0
        self._num_resyncs = 0
        self._is_listing = False
        self._reachable: bool | None = None
        self._wake = asyncio.Event()
        self._supervisor = TaskSupervisor("lookup-reporter", max_tasks=1)

    @property
    def registered(self) -> bool:
        """Whether the latest lease from the service is still valid."""
        return time.monotonic() < self._lease_ends

    @property
    def synced(self) -> bool:
        """Whether the service has acknowledged everything, under a valid lease."""
        is_told = (
            not self._outbox.needs_resync
            and not self._is_listing
            and self._outbox.num_unacknowledged == 0
        )
        return self.registered and is_told

    @property
    def stats(self) -> dict[str, int]:
        """Return figures for status pages."""
        return {
            "incarnation": self._outbox.incarnation,
            "num_unacknowledged": self._outbox.num_unacknowledged,
            "num_resyncs": self._num_resyncs,
            "num_overflows": self._outbox.num_overflows,
            "registered": int(self.registered),
        }

    async def open(self) -> None:
        """Begin to report. Returns immediately, whether or not the service is available."""
        self._supervisor.repeat("report", self._report, interval_s=_RESTART_S)

    def announce_again(self) -> None:
        """Announce everything again in a new incarnation, after more changes than single events can
        report.
        """
        self._outbox.lose()
        self._wake.set()

    def stored(
        self, chunk_id: bytes, tier: str, size_bytes: int, tenant: str | None = None
    ) -> None:
        """Report that a chunk is available from now on. Call it after the chunk is complete; see
        `Holding` for the arguments.

        Raises:
            ValueError: An argument is malformed.
        """
        self._outbox.add(
            _event("store", Holding(chunk_id, validate_tier(tier), size_bytes, tenant))
        )
        self._wake.set()

    def removed(self, chunk_id: bytes, tier: str, tenant: str | None = None) -> None:
        """Report that a chunk is gone from a tier.

        Raises:
            ValueError: An argument is malformed.
        """
        self._outbox.add(_event("remove", Holding(chunk_id, validate_tier(tier), 0, tenant)))
        self._wake.set()

    async def close(self) -> None:
        """Stop reporting and end the lease if the service is reachable; otherwise the lease
        expires.
        """
        await self._supervisor.close()
        if not self.registered or self._reachable is False:
            return
        self._lease_ends = float("-inf")
        try:
            await self._client.end_instance(self._instance_id, incarnation=self._last_incarnation)
        except UnavailableError as exc:
            logger.info(
                "lookup lease not ended, it expires: instance=%s error=%s", self._instance_id, exc
            )

    async def _report(self) -> None:
        """Do what is due and wait for the next due time, forever."""
        while True:
            await asyncio.sleep(self._backoff.wait_s)
            try:
                await self._advance()
            except UnavailableError as exc:
                self._backoff.failed()
                self._note(False, "lookup unavailable", f"error={exc}")
                continue
            if self._outbox.needs_resync:
                # Resyncs are paced like failures: a service that always asks for one must not be
                # flooded with announcements.
                self._backoff.failed()
            elif self._outbox.num_unacknowledged == 0:
                self._backoff.succeeded()
                await self._wait_for_events()

    async def _wait_for_events(self) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._renew_at - time.monotonic())):
                await self._wake.wait()
            await asyncio.sleep(self._timing.gather_s)

    async def _advance(self) -> None:
        """Ensure a lease that is not about to end, then send one batch."""
        if self._outbox.needs_resync:
            await self._resync()
        elif time.monotonic() >= self._renew_at:
            await self._renew(self._outbox.incarnation)
        if self._outbox.needs_resync or self._outbox.num_unacknowledged == 0:
            return
        first_sequence, events = self._outbox.batch(MAX_EVENTS_PER_BATCH)
        ack = await self._client.send_events(
            self._instance_id,
            incarnation=self._outbox.incarnation,
            first_sequence=first_sequence,
            events=events,
        )
        self._take(ack.next_sequence, ack.resync)

    async def _resync(self) -> None:
        """Take a lease of a higher incarnation first: no announcement is prepared for a service
        that is unavailable.
        """
        self._last_incarnation = max(time.time_ns(), self._last_incarnation + 1)
        lease = await self._renew(self._last_incarnation, acknowledges=False)
        if not lease:
            return
        self._num_resyncs += 1
        # Events are kept from here on and sent after the announcement: changes made while it is
        # prepared are reported even if it already includes them.
        self._outbox.begin(self._last_incarnation)
        self._is_listing = True
        try:
            announcement = await asyncio.to_thread(
                lambda: deque(_event("store", holding) for holding in self._snapshot())
            )
        except BaseException:
            self._outbox.lose()
            raise
        finally:
            self._is_listing = False
        self._outbox.announce(announcement)

    async def _renew(self, incarnation: int, *, acknowledges: bool = True) -> bool:
        """Take or renew the lease.

        Returns:
            False if the service rejects this incarnation.
        """
        asked_at = time.monotonic()
        lease = await self._client.renew_instance(
            self._instance_id, incarnation=incarnation, kind=self._kind, ttl_ms=self._timing.ttl_ms
        )
        self._note(True, "lookup lease granted", f"ttl_ms={lease.ttl_ms}")
        self._lease_ends = float("-inf") if lease.resync else asked_at + lease.ttl_ms / 1000
        self._renew_at = asked_at + lease.ttl_ms / 1000 / RENEWALS_PER_LEASE
        if acknowledges:
            self._take(lease.next_sequence, lease.resync)
        return not lease.resync

    def _take(self, next_sequence: int, resync: bool) -> None:
        if resync:
            self._outbox.lose()
        else:
            self._outbox.acknowledge(next_sequence)

    def _note(self, reachable: bool, what: str, detail: str) -> None:
        """Log changes only: an hour without the service is one line."""
        if reachable != self._reachable:
            self._reachable = reachable
            logger.log(
                logging.INFO if reachable else logging.WARNING,
                "%s: instance=%s %s",
                what,
                self._instance_id,
                detail,
            )


def _event(op: EventOp, holding: Holding) -> StoreEvent:
    chunk_id = pack_ids([holding.chunk_id])  # checks its length
    return StoreEvent(op, chunk_id, holding.tier, holding.size_bytes, holding.tenant)
