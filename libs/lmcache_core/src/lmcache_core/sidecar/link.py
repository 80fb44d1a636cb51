"""The connection to a sidecar that may be absent, hang, die and come back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lmcache_core.errors import LMCacheError, ProtocolError, UnavailableError
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.messages import Hello

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
MAX_WAIT_S = 1.0
"""Between two attempts to connect: so long may a sidecar that is back go unnoticed. A pod's first
request comes as soon as its engine has started.
"""
SLOW_S = 0.05
WAIT_PER_COST = 4
"""A connection that made a caller wait longer than `SLOW_S` is not made again before this many
times that wait: a sidecar that says HELLO and then hangs must not be slower than no cache.
"""
MAX_WAIT_AFTER_SLOW_S = 30.0
STEADY_S = 10.0
"""A connection that lasted so long was a good one: the waits begin anew."""


class SidecarLink:
    """One connection, made again in the background: once `open` has returned no caller waits for
    connecting.

    Args:
        path: The sidecar's socket.
        hello: What to say at each connection.
        timeout_s: Deadline of connecting, and of calls that name none.
        on_connected: Called with each connection before others can see it, maybe in a background
            thread. One on which it fails is none.
    """

    def __init__(
        self,
        path: Path,
        hello: Hello,
        timeout_s: float,
        on_connected: Callable[[SidecarConnection], None],
    ) -> None:
        self._path = path
        self._hello = hello
        self._timeout_s = timeout_s
        self._on_connected = on_connected
        self._current: SidecarConnection | None = None
        self._connected_at = 0.0
        self._wait_s = FIRST_WAIT_S
        self._complaint = ""
        self._begin_afresh()

    @property
    def connection(self) -> SidecarConnection | None:
        """The connection, or None while there is none."""
        if os.getpid() != self._pid:
            self._begin_afresh()
            self._reconnect_later(None)
        current = self._current
        return current if current is not None and current.is_open else None

    def open(self) -> None:
        """Try to connect, once here and then in the background."""
        try:
            self._connect()
        except (UnavailableError, ProtocolError, OSError) as exc:
            self._say_lost(exc)
            self._reconnect_later(None)

    def close(self) -> None:
        """Close the connection and make no other. Idempotent."""
        self._closing.set()
        with self._lock:
            current, self._current = self._current, None
            thread = self._thread
        if current is not None:
            current.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_s)

    def lost(self, connection: SidecarConnection, cause: LMCacheError, cost_s: float) -> None:
        """A connection is no longer open; tell once or more often.

        Args:
            connection: Which.
            cause: Why.
            cost_s: How long a caller has waited for nothing.
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

    def _begin_afresh(self) -> None:
        """Also in a forked child, whose parent keeps the connection and in which no other thread
        lives on.
        """
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._current = None

    def _connect(self) -> None:
        connection = SidecarConnection(self._path, self._hello, self._timeout_s)
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
                self._current, self._connected_at = connection, time.monotonic()
        if self._current is not connection:
            connection.close()
            return
        self._complaint = ""
        welcome = connection.welcome
        logger.info(
            "connected to sidecar %s, arena of %d bytes", welcome.server, welcome.arena_bytes
        )

    def _reconnect_later(self, wait_s: float | None) -> None:
        with self._lock:
            if self._closing.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(
                target=self._reconnect,
                args=(FIRST_WAIT_S if wait_s is None else wait_s,),
                name="lmcache-sidecar-link",
                daemon=True,
            )
            self._thread.start()

    def _reconnect(self, wait_s: float) -> None:
        while not self._closing.wait(wait_s):
            next_wait_s = max(wait_s, min(2 * wait_s, MAX_WAIT_S))
            try:
                self._connect()
            except (UnavailableError, ProtocolError, OSError) as exc:
                logger.debug("no sidecar yet: %s", exc)
                wait_s = next_wait_s
                continue
            # a fault that nobody foresaw ends this thread, for all to see; another one goes on
            # trying
            except Exception as exc:
                logger.error(
                    "connecting to the sidecar failed: %r; the next attempt is in %.1f s",
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
                wait_s = (
                    self._wait_s
                )  # lost again already, and this thread was taken to be still at work

    def _complain(self, cause: LMCacheError, is_there: bool) -> None:
        """A sidecar that answers and cannot be used has something wrong that does not pass by
        itself: say so, once for each cause.
        """
        if is_there and str(cause) != self._complaint and not self._closing.is_set():
            self._complaint = str(cause)
            logger.error("the sidecar at %s answers, and cannot be used: %s", self._path, cause)

    def _say_lost(self, cause: LMCacheError | OSError) -> None:
        if not self._closing.is_set():
            logger.warning("no sidecar, going on without a cache: %s", cause)
