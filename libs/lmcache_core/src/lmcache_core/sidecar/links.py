"""What a client asks over its links to the sidecar, and what becomes of them when there is no answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TypeVar

from lmcache_core.errors import LMCacheError, ProtocolError, UnavailableError
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.link import SidecarLink
from lmcache_core.sidecar.messages import Message

logger = logging.getLogger(__name__)

TURN_S = 0.5
"""Longest wait for other threads' requests before a call does without the cache."""

A = TypeVar("A", bound=Message)


class SidecarLinks:
    """Links of one client to one sidecar. What one of them has lent goes back through that one.

    Args:
        links: They; each is closed with the others.
    """

    def __init__(self, links: Sequence[SidecarLink]) -> None:
        self._links = tuple(links)

    def open(self) -> None:
        """Try to connect; no sidecar is not an error."""
        for link in self._links:
            link.open()

    def close(self) -> None:
        """End the connections. Idempotent."""
        for link in self._links:
            link.close()

    def ask(
        self, connection: SidecarConnection, request: Message, expected: type[A], timeout_s: float | None = None, turn_s: float = TURN_S
    ) -> A | None:
        """See `SidecarConnection.call`; None when there is no answer, of whatever reason."""
        begin = time.monotonic()
        try:
            return connection.call(request, expected, timeout_s, turn_s)
        except (UnavailableError, ProtocolError) as exc:
            if connection.is_open:
                logger.debug("%s", exc)
            else:
                self._lost(connection, exc, time.monotonic() - begin)
            return None

    def give_up(self, connection: SidecarConnection, why: str) -> None:
        """Use a connection no more: its other end is not to be believed, or cannot be told something that it must know."""
        connection.close()
        self._lost(connection, ProtocolError(why), 0.0)

    def _lost(self, connection: SidecarConnection, cause: LMCacheError, cost_s: float) -> None:
        """A sidecar that has gone has closed the other connections too: they are made again at once, not at their next call."""
        for link in self._links:
            link.lost(connection, cause, cost_s)
            current = link.connection
            if current is not None and current.has_ended:
                current.close()
                link.lost(current, cause, 0.0)
