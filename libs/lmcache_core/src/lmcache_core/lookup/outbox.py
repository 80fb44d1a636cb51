"""What an instance has yet to tell the lookup service, in order and numbered. Pure bookkeeping,
no I/O.
"""

from __future__ import annotations

import itertools
from collections import deque

from lmcache_core.lookup.messages import Holding, StoreEvent, chunk_id_text


class Outbox:
    """Events of one incarnation that the service has not acknowledged.

    It begins in need of a resync: nothing is known of what the service knows. While it is in need,
    events are not kept, since the announcement that follows says everything.

    Args:
        max_pending: Bound on events besides the announcement; one more loses them all and asks
            for a resync.
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
        """Events that are still to be sent or acknowledged."""
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
        """Forget everything: the service has to be told from the beginning, by a higher
        incarnation.
        """
        self._announcement.clear()
        self._pending.clear()
        self.needs_resync = True

    def begin(self, incarnation: int) -> None:
        """Start an incarnation: keep events from now on. `announce` is next, before any batch."""
        assert incarnation > self.incarnation, "an incarnation only rises"
        self._announcement = deque()
        self._pending.clear()
        self._first_sequence = self._num_sent = 0
        self.incarnation = incarnation
        self.needs_resync = False

    def announce(self, announcement: deque[StoreEvent]) -> None:
        """Say what was held at some time after `begin`, before all events that came since."""
        assert self._num_sent == 0, "it is the first that is sent"
        if not self.needs_resync:  # too many events may have come meanwhile
            self._announcement = announcement

    def batch(self, max_events: int) -> tuple[int, list[StoreEvent]]:
        """The oldest events, which stay until they are acknowledged.

        Returns:
            The sequence number of the first, and at most `max_events` events.
        """
        events = list(
            itertools.islice(itertools.chain(self._announcement, self._pending), max_events)
        )
        self._num_sent = max(self._num_sent, len(events))
        return self._first_sequence, events

    def acknowledge(self, next_sequence: int) -> None:
        """Drop what the service has taken. A number that cannot be true means that it has
        forgotten: everything is lost.
        """
        num_taken = next_sequence - self._first_sequence
        if not 0 <= num_taken <= self._num_sent:
            self.lose()
            return
        for _ in range(num_taken):
            (self._announcement or self._pending).popleft()
        self._first_sequence = next_sequence
        self._num_sent -= num_taken


def event_of(op: str, holding: Holding) -> StoreEvent:
    """The event that says that a holding came (`store`) or went (`remove`).

    Raises:
        ValueError: The chunk id has not 16 bytes.
    """
    assert op in ("store", "remove")
    return StoreEvent(
        "store" if op == "store" else "remove",
        chunk_id_text(holding.chunk_id),
        holding.tier,
        holding.size_bytes,
        holding.tenant,
    )
