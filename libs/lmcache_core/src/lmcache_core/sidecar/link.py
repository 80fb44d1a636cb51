"""The connection to a sidecar that may be absent, hang, die and return."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.errors import LMCacheError, ProtocolError, UnavailableError
from lmcache_core.forks import ProcessMark
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.mapping import ArenaMappings
from lmcache_core.wire.messages import Hello

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

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
        hello: First message of each connection.
        timeout_s: Deadline of connecting, and of calls without their own.
        on_connected: Called with each connection before it is visible to others, possibly in a
            background thread. If it fails, the connection is discarded.
        on_lost: See `SidecarConnection`; must call `lost`, as it does by default.
        mappings: Those of the client; by default it has no other link.
    """

    def __init__(
        self,
        path: Path,
        hello: Hello,
        timeout_s: float,
        on_connected: Callable[[SidecarConnection], None],
        on_lost: Callable[[SidecarConnection, LMCacheError, float], None] | None = None,
        mappings: ArenaMappings | None = None,
    ) -> None:
        self._path = path
        self._hello = hello
        self._timeout_s = timeout_s
        self._on_connected = on_connected
        self._on_lost = on_lost or self.lost
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
        except (UnavailableError, ProtocolError) as exc:
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
            current.join()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_s)

    def lost(self, connection: SidecarConnection, cause: LMCacheError, cost_s: float) -> None:
        """Record that a connection is no longer open; repeated calls are harmless.

        Args:
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
        connection = SidecarConnection(
            self._path, self._hello, self._timeout_s, self._mappings, self._on_lost
        )
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
            connection.mapping.pin(self._pins_for, is_serving=True)

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
            except (UnavailableError, ProtocolError) as exc:
                logger.debug("no sidecar yet: error=%s", exc)
                wait_s = next_wait_s
                continue
            # An unforeseen fault ends this thread visibly; another thread keeps trying.
            except Exception as exc:
                logger.error(
                    "connecting to the sidecar failed: error=%r retry_in_s=%.1f",
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

    def _say_lost(self, cause: LMCacheError) -> None:
        if not self._closing.is_set():
            # As text: a handler that keeps records would keep the connection, and so its arena.
            logger.warning("no sidecar, computing without a cache: error=%s", str(cause))
