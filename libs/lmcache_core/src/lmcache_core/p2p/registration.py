"""Keeps one instance registered with the broker for as long as it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p.broker_client import BrokerClient
from lmcache_core.p2p.messages import CopyOrder, DrainReport, Peer, PeerFigures

logger = logging.getLogger(__name__)

FIRST_INTERVAL_S: Final = 5.0
"""Interval between two attempts while no broker has granted a lease, if no length was requested."""
RENEWALS_PER_LEASE: Final = 3
DRAINING_INTERVAL_S: Final = 1.0
"""Interval between two renewals of a draining instance, so that its progress is visible."""

_MIN_PAUSE_S: Final = 0.05


class LeaseListener(Protocol):
    """Handles the broker's requests to an instance, and reports progress. Called on the loop; must
    not block.
    """

    def drain_wanted(self) -> None:
        """Begin the drain: the instance is about to shut down. Called once."""

    def copies_wanted(self, orders: Sequence[CopyOrder]) -> None:
        """Copy these chunks to other peers."""

    def drain_report(self) -> DrainReport | None:
        """Return the progress of a drain; None before it."""


class PeerRegistration:
    """Renews one peer's lease.

    An unavailable broker costs nothing but the lease: `open` does not wait for it, and the next
    renewal registers again, since an announcement contains everything that the broker needs. That
    includes draining, which survives a broker's restart.

    Args:
        client: Must stay open as long as this object.
        load: Called before each renewal; 0 (idle) to 1 (full).
        ttl_ms: The lease to request; None: the broker's `default_lease_ttl_ms`. It is renewed three
            times within the lease granted.
        figures: Called before each renewal, on the loop: counters of the instance and what it
            holds.

    Attributes:
        draining: Whether this instance gets no new pulls, by its own decision or the broker's.
    """

    def __init__(
        self,
        client: BrokerClient,
        peer: Peer,
        load: Callable[[], float] = lambda: 0.0,
        *,
        ttl_ms: int | None = None,
        listener: LeaseListener | None = None,
        figures: Callable[[], PeerFigures] | None = None,
    ) -> None:
        self._client = client
        self._peer = peer
        self._load = load
        self._ttl_ms = ttl_ms
        self._listener = listener
        self._figures = figures
        self._interval_s = 0.0
        self._lease_ends = 0.0
        self.draining = False
        self._reachable: bool | None = None
        self._wake = asyncio.Event()
        self._supervisor = TaskSupervisor("p2p-registration", max_tasks=1)

    @property
    def registered(self) -> bool:
        """Whether the latest lease from the broker is still valid."""
        return time.monotonic() < self._lease_ends

    async def open(self) -> None:
        """Begin to register. Returns immediately."""
        self._supervisor.repeat("lease", self._beat, interval_s=_MIN_PAUSE_S)

    def drain(self) -> None:
        """Request no new pulls, now and for the rest of this incarnation."""
        self.draining = True
        self._wake.set()

    def undrain(self) -> None:
        """Ask for pulls again, as a new incarnation: a drain lasts for one."""
        incarnation = max(time.time_ns(), self._peer.incarnation + 1)
        self._peer = msgspec.structs.replace(self._peer, incarnation=incarnation)
        self.draining = False
        self._wake.set()

    async def close(self) -> None:
        """Stop renewing and end the lease if the broker is reachable; otherwise the lease
        expires.
        """
        await self._supervisor.close()
        self._lease_ends = 0.0
        if self._reachable is False:
            return
        try:
            await self._client.deregister(self._peer.id)
        except UnavailableError as exc:
            logger.info("lease not ended, it expires: peer=%s error=%s", self._peer.id, exc)

    async def _beat(self) -> None:
        """Wait until a renewal is due, then renew. The wait comes first, so that an unexpected
        failure is not retried immediately.
        """
        with contextlib.suppress(TimeoutError):
            interval_s = (
                min(self._interval_s, DRAINING_INTERVAL_S) if self.draining else self._interval_s
            )
            async with asyncio.timeout(max(0.0, interval_s - _MIN_PAUSE_S)):
                await self._wake.wait()
        self._wake.clear()
        self._interval_s = self._interval_s or (
            FIRST_INTERVAL_S if self._ttl_ms is None else self._ttl_ms / 1000 / RENEWALS_PER_LEASE
        )
        await self._renew()

    async def _renew(self) -> None:
        asked_at, peer = time.monotonic(), self._peer
        try:
            lease = await self._client.register(
                peer,
                load=self._load(),
                ttl_ms=self._ttl_ms,
                draining=self.draining,
                drain=None if self._listener is None else self._listener.drain_report(),
                figures=None if self._figures is None else self._figures(),
            )
        except UnavailableError as exc:
            # Only changes are logged: an hour without a broker is one line.
            if self._reachable is not False:
                logger.warning("broker unavailable, retrying: peer=%s error=%s", self._peer.id, exc)
            self._reachable = False
            return
        self._lease_ends = asked_at + lease.ttl_ms / 1000
        self._interval_s = lease.ttl_ms / 1000 / RENEWALS_PER_LEASE
        is_drained = lease.draining and peer is self._peer  # not a former incarnation
        is_wish = is_drained and not self.draining
        self.draining = self.draining or is_drained
        if self._listener is not None:
            if is_wish:
                self._listener.drain_wanted()
            if lease.copies:
                self._listener.copies_wanted(lease.copies)
        if not self._reachable:
            logger.info("lease granted: peer=%s ttl_ms=%d", self._peer.id, lease.ttl_ms)
        self._reachable = True
