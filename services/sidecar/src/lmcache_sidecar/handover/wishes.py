"""What the broker wishes of this sidecar, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.p2p import CopyOrder, DrainReport

from lmcache_sidecar.handover.copies import Copier
from lmcache_sidecar.handover.drain import Drain


class BrokerWishes:
    """See `LeaseListener`.

    Args:
        drain: The way to the end.
        copier: Sends copies.
    """

    def __init__(self, drain: Drain, copier: Copier) -> None:
        self._drain = drain
        self._copier = copier

    def drain_wanted(self) -> None:
        """See `LeaseListener.drain_wanted`."""
        self._drain.begin()

    def copies_wanted(self, orders: Sequence[CopyOrder]) -> None:
        """See `LeaseListener.copies_wanted`; who is about to end hands over everything instead."""
        if not self._drain.has_begun:
            self._copier.copy(orders)

    def drain_report(self) -> DrainReport | None:
        """See `LeaseListener.drain_report`."""
        if not self._drain.has_begun:
            return None
        progress = self._drain.progress
        return DrainReport(
            progress.state.value,
            progress.total,
            progress.handed_over,
            progress.already_elsewhere,
            progress.failed,
            progress.left,
        )
