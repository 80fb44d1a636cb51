"""What a client asks over its links to the sidecar, and what becomes of them when there is no
answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lmcache_core.errors import LMCacheError, ProtocolError, UnavailableError
from lmcache_core.sidecar.connection import Question, SidecarConnection
from lmcache_core.sidecar.link import SidecarLink
from lmcache_core.sidecar.messages import Message

logger = logging.getLogger(__name__)

TURN_S = 0.5
"""Longest wait for other threads' requests before a call does without the cache."""

A = TypeVar("A", bound=Message)
T = TypeVar("T")


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
        self,
        connection: SidecarConnection,
        request: Message,
        expected: type[A],
        timeout_s: float | None = None,
        turn_s: float = TURN_S,
    ) -> A | None:
        """See `SidecarConnection.call`; None when there is no answer, of whatever reason."""
        return self._tried(
            connection, lambda: connection.call(request, expected, timeout_s, turn_s)
        )

    def send(
        self, connection: SidecarConnection, request: Message, expected: type[A]
    ) -> Question[A] | None:
        """See `SidecarConnection.send`; None if it could not be sent."""
        return self._tried(connection, lambda: connection.send(request, expected))

    def answer_to(
        self, connection: SidecarConnection, question: Question[A], wait_s: float
    ) -> A | None:
        """See `SidecarConnection.answer_to`; None if there is no answer (yet)."""
        return self._tried(connection, lambda: connection.answer_to(question, wait_s))

    def seconds_to_answer(
        self, connection: SidecarConnection, request: Message, expected: type[A], timeout_s: float
    ) -> float:
        """Ask without keeping other threads from asking, and return how long the answer took.

        Return infinity if there is no answer, or the question cannot be sent just now. A connection
        that leaves this question or an earlier one unanswered for `timeout_s` is given up.
        """
        question = self.send(connection, request, expected)
        if question is None:
            # It may be full of questions that a hanging sidecar does not read. While another
            # thread has the turn, nothing is known: its call has a deadline of its own.
            unanswered_s = self._tried(connection, connection.read_arrived)
            if unanswered_s is not None and unanswered_s > timeout_s:
                self.give_up(
                    connection, f"an earlier request was not answered within {timeout_s:g} s"
                )
            return math.inf
        try:
            if connection.await_answer(question, timeout_s) is not None:
                return question.took_s
            self.give_up(connection, f"{question.name} was not answered within {timeout_s:g} s")
        except (UnavailableError, ProtocolError) as exc:
            self._lost(connection, exc, 0.0)  # the engine did not wait
        return math.inf

    def give_up(self, connection: SidecarConnection, why: str) -> None:
        """Close a connection whose sidecar cannot be trusted, or missed a message that it must
        know.
        """
        connection.close()
        self._lost(connection, ProtocolError(why), 0.0)

    def _tried(self, connection: SidecarConnection, call: Callable[[], T]) -> T | None:
        begin = time.monotonic()
        try:
            return call()
        except (UnavailableError, ProtocolError) as exc:
            if connection.is_open:
                logger.debug("%s", exc)
            else:
                self._lost(connection, exc, time.monotonic() - begin)
            return None

    def _lost(self, connection: SidecarConnection, cause: LMCacheError, cost_s: float) -> None:
        """A sidecar that has gone has closed the other connections too: they are made again at
        once, not at their next call.
        """
        for link in self._links:
            link.lost(connection, cause, cost_s)
            current = link.connection
            if current is not None and current.has_ended:
                current.close()
                link.lost(current, cause, 0.0)
