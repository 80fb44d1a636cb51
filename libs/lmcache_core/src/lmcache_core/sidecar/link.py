"""The connection to a sidecar that may be absent, hang, die and return."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lmcache_core.errors import LMCacheError, ProtocolError, UnavailableError
from lmcache_core.forks import ProcessMark
from lmcache_core.sidecar.connection import Question, SidecarConnection
from lmcache_core.sidecar.mapping import ArenaMappings
from lmcache_core.wire.messages import Hello, Message

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)
T = TypeVar("T")

TURN_S = 0.5
"""Longest wait for other threads' requests before a call proceeds without the cache."""

FIRST_WAIT_S = 0.1
MAX_WAIT_S = 1.0
"""Longest interval between two attempts to connect, and so the longest time for which a returning
sidecar goes unnoticed. A pod's first request comes as soon as its engine has started.
"""
SLOW_S = 0.05
WAIT_PER_COST = 4
"""After a connection that made a caller wait longer than `SLOW_S`, the next attempt waits this many
times as long: a sidecar that answers HELLO and then hangs must not be slower than no cache.
"""
MAX_WAIT_AFTER_SLOW_S = 30.0
STEADY_S = 10.0
"""A connection that lasted this long was good: the waits start over."""


class SidecarLink:
    """One connection, re-established in the background: once `open` has returned, no caller waits
    for connecting.

    Args:
        path: The sidecar's socket.
        hello: First message of each connection.
        timeout_s: Deadline of connecting, and of calls without their own.
        on_connected: Called with each connection before it is visible to others, possibly in a
            background thread. If it fails, the connection is discarded.
        mappings: Those of the client; by default it has no other link.
    """

    def __init__(
        self,
        path: Path,
        hello: Hello,
        timeout_s: float,
        on_connected: Callable[[SidecarConnection], None],
        mappings: ArenaMappings | None = None,
    ) -> None:
        self._path = path
        self._hello = hello
        self._timeout_s = timeout_s
        self._on_connected = on_connected
        self._mappings = mappings or ArenaMappings()
        self._current: SidecarConnection | None = None
        self._pins_for: torch.device | None = None
        self._connected_at = 0.0
        self._wait_s = FIRST_WAIT_S
        self._complaint = ""
        self._reset()

    @property
    def connection(self) -> SidecarConnection | None:
        """Return the connection; None if there is none."""
        if not self._process.is_here:
            self._reset()
            self._reconnect_later(None)
        if self._lacks_thread:
            self._reconnect_later(self._wait_s)
        current = self._current
        return current if current is not None and current.is_open else None

    def open(self) -> None:
        """Try to connect, once immediately and then in the background."""
        try:
            self._connect()
        except (UnavailableError, ProtocolError, OSError) as exc:
            self._say_lost(exc)
            self._reconnect_later(None)

    def pin_memory(self, device: torch.device) -> None:
        """Pin the arena of this connection, and of later ones in the background."""
        self._pins_for = device
        current = self.connection
        if current is not None:
            current.mapping.pin(device)

    def close(self) -> None:
        """Close the connection and stop reconnecting. Idempotent."""
        if not self._process.is_here:
            self._reset()
        self._closing.set()
        with self._lock:
            current, self._current = self._current, None
            thread = self._thread
        if current is not None:
            current.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_s)

    def lost(self, connection: SidecarConnection, cause: LMCacheError, cost_s: float) -> None:
        """Record that a connection is no longer open; repeated calls are harmless.

        Args:
            connection: The connection.
            cause: Why it was lost.
            cost_s: How long a caller waited in vain.
        """
        with self._lock:
            if self._current is not connection:
                return
            self._current = None
            if time.monotonic() - self._connected_at - cost_s > STEADY_S:
                self._wait_s = FIRST_WAIT_S
            if cost_s > SLOW_S:
                self._wait_s = min(
                    max(2 * self._wait_s, WAIT_PER_COST * cost_s), MAX_WAIT_AFTER_SLOW_S
                )
            else:
                self._wait_s = max(self._wait_s, min(2 * self._wait_s, MAX_WAIT_S))
        self._say_lost(cause)
        self._reconnect_later(self._wait_s)

    def _reset(self) -> None:
        """Reset to the state without a connection; also in a forked child, whose parent keeps the
        connection, and which has no other thread and no CUDA.
        """
        self._process = ProcessMark()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lacks_thread = False  # the next caller tries again to start one
        self._current = None
        self._pins_for = None

    def _connect(self) -> None:
        connection = SidecarConnection(self._path, self._hello, self._timeout_s, self._mappings)
        try:
            connection.open()
        except (UnavailableError, ProtocolError) as exc:
            self._complain(exc, connection.is_greeted or isinstance(exc, ProtocolError))
            raise
        try:
            self._on_connected(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._closing.is_set():
                if not connection.is_open:
                    # Its loss was reported when it was not this link's connection yet.
                    raise UnavailableError("the connection to the sidecar was lost at once")
                self._current, self._connected_at = connection, time.monotonic()
        if self._current is not connection:
            connection.close()
            return
        self._complaint = ""
        logger.info(
            "connected to a sidecar: server=%r arena_bytes=%d",
            connection.welcome.server,
            connection.arena_info.num_bytes,
        )
        if self._pins_for is not None:
            connection.mapping.pin(self._pins_for)

    def _reconnect_later(self, wait_s: float | None) -> None:
        with self._lock:
            if self._closing.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            thread = threading.Thread(
                target=self._reconnect,
                args=(FIRST_WAIT_S if wait_s is None else wait_s,),
                name="lmcache-sidecar-link",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:
                self._lacks_thread = True
            else:
                self._thread, self._lacks_thread = thread, False

    def _reconnect(self, wait_s: float) -> None:
        while not self._closing.wait(wait_s):
            next_wait_s = max(wait_s, min(2 * wait_s, MAX_WAIT_S))
            try:
                self._connect()
            except (UnavailableError, ProtocolError, OSError) as exc:
                logger.debug("no sidecar yet: %s", exc)
                wait_s = next_wait_s
                continue
            # An unforeseen fault ends this thread visibly; another thread keeps trying.
            except Exception as exc:
                logger.error(
                    "connecting to the sidecar failed: %r; retry_in_s=%.1f",
                    exc,
                    next_wait_s,
                )
                with self._lock:
                    self._thread = None
                self._reconnect_later(next_wait_s)
                raise
            with self._lock:
                if self._current is not None:
                    self._thread = None
                    return
                wait_s = self._wait_s  # lost again before this thread was known to have ended

    def _complain(self, cause: LMCacheError, is_there: bool) -> None:
        """Log once per cause that a sidecar answers but is unusable: that does not resolve by
        itself.
        """
        if is_there and str(cause) != self._complaint and not self._closing.is_set():
            self._complaint = str(cause)
            logger.error(
                "the sidecar answers but is unusable: socket=%s error=%s", self._path, cause
            )

    def _say_lost(self, cause: LMCacheError | OSError) -> None:
        if not self._closing.is_set():
            # As text: a handler that keeps records would keep the connection, and so its arena.
            logger.warning("no sidecar, computing without a cache: error=%s", str(cause))


class SidecarLinks:
    """The links of one client to one sidecar. Whatever a link has lent is returned through that
    link.

    Args:
        links: The links; they are closed together.
    """

    def __init__(self, links: Sequence[SidecarLink]) -> None:
        self._links = tuple(links)

    def open(self) -> None:
        """Try to connect; a missing sidecar is not an error."""
        for link in self._links:
            link.open()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for link in self._links:
            link.close()

    def pin_memory(self, device: torch.device) -> None:
        """Pin the arena for copies to and from a device."""
        for link in self._links:
            link.pin_memory(device)

    def ask(
        self,
        connection: SidecarConnection,
        request: Message,
        expected: type[A],
        timeout_s: float | None = None,
        turn_s: float = TURN_S,
    ) -> A | None:
        """Call `SidecarConnection.call`; return None if no answer arrives, for any reason."""
        return self._tried(
            connection, lambda: connection.call(request, expected, timeout_s, turn_s)
        )

    def send(
        self, connection: SidecarConnection, request: Message, expected: type[A]
    ) -> Question[A] | None:
        """Call `SidecarConnection.send`; return None if sending failed."""
        return self._tried(connection, lambda: connection.send(request, expected))

    def answer_to(
        self, connection: SidecarConnection, question: Question[A], wait_s: float
    ) -> A | None:
        """Call `SidecarConnection.answer_to`; return None if there is no answer (yet)."""
        return self._tried(connection, lambda: connection.answer_to(question, wait_s))

    def seconds_to_answer(
        self, connection: SidecarConnection, request: Message, expected: type[A], timeout_s: float
    ) -> float:
        """Ask without blocking other threads' requests, and return how long the answer took.

        Return infinity if there is no answer, or the question cannot be sent now. A connection that
        leaves this question or an earlier one unanswered for `timeout_s` is closed.
        """
        question = self.send(connection, request, expected)
        if question is None:
            # The connection may be full of questions that a hanging sidecar does not read. While
            # another thread holds it, nothing is known: that call has its own deadline.
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
        receive.
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
        """Report the loss to all links: a sidecar that is gone has closed the other connections,
        too. They reconnect immediately, not at their next call.
        """
        for link in self._links:
            link.lost(connection, cause, cost_s)
            current = link.connection
            if current is not None and current.has_ended:
                current.close()
                link.lost(current, cause, 0.0)
