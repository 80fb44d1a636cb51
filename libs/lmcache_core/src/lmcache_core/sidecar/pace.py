"""Tracks how quickly the sidecar answers at present."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from lmcache_core.forks import enter_children

QUICK_S = 0.003
"""A wait this short is always acceptable: a healthy sidecar answers in a fraction of it."""
MAX_DELAY = 0.02
"""Beyond that, an answer is worth waiting for if the wait is at most this fraction of what it can
save.
"""
MAX_FIRST_DELAY = 0.25
"""While all answers have been quick, a late one is awaited for up to this fraction."""
REST_PER_LOSS = 20
MAX_REST_S = 1.0
"""After a wait in vain, the sidecar is not asked for this many times as long, so that an unsteady
one costs a few percent at most.
"""
PROBE_S = 0.25
"""Interval between two probes of a late sidecar, from question to question: a probe that took
longer says little about the present, and may have waited for this process itself.
"""


class Pace:
    """Keeps the latest answer time of the sidecar; while it is long, a background thread probes it.
    Thread-safe.

    Args:
        probe: Sends an empty question and returns how long its answer took; infinity if it was not
            answered or could not be sent now, None without a connection.
    """

    def __init__(self, probe: Callable[[], float | None]) -> None:
        self._probe = probe
        self._closing = threading.Event()
        self.enter_child()
        enter_children(self)

    def enter_child(self) -> None:
        """Begin without a thread, and without knowledge of the sidecar."""
        self._took_s = 0.0
        self._rests_until = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_quick(self) -> bool:
        """Return whether an immediate answer can be expected."""
        return self._took_s <= QUICK_S

    def is_worth(self, saving_s: float) -> bool:
        """Return whether an answer that can save `saving_s` is worth the wait."""
        return self._took_s <= max(QUICK_S, MAX_DELAY * saving_s)

    def patience_s(self, saving_s: float) -> float:
        """Return how long to wait for a late answer that can save `saving_s`."""
        return max(QUICK_S, MAX_FIRST_DELAY * saving_s)

    def took(self, seconds: float, rest_s: float = 0.0) -> None:
        """Record that an answer took `seconds`, or has been outstanding for that long.

        Args:
            seconds: The time.
            rest_s: How long not to ask again even if the sidecar is quick.
        """
        self._took_s = seconds
        if seconds > QUICK_S:
            with self._lock:
                self._rests_until = max(self._rests_until, time.monotonic() + rest_s)
                if not self._closing.is_set() and (
                    self._thread is None or not self._thread.is_alive()
                ):
                    thread = threading.Thread(
                        target=self._run, name="lmcache-sidecar-pace", daemon=True
                    )
                    try:
                        thread.start()
                    except RuntimeError:  # no probe would ever say that it is quick again
                        self._took_s = 0.0
                    else:
                        self._thread = thread

    def wasted(self, seconds: float) -> None:
        """Record that a caller waited this long in vain."""
        self.took(seconds, min(REST_PER_LOSS * seconds, MAX_REST_S))

    def unsent(self, unanswered_s: float) -> None:
        """Record that a question could not be sent while an earlier one has been unanswered for
        `unanswered_s`.
        """
        if self.is_quick:
            # That answer may have arrived unread: the probe finds out.
            self.took(min(unanswered_s, 2 * QUICK_S))

    def close(self) -> None:
        """Stop the thread after the probe in progress. Idempotent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join(MAX_REST_S)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(max(wait_s, self._rests_until - time.monotonic())):
            took_s = self._probe()
            with self._lock:
                # A rest may have begun during the probe.
                has_rested = time.monotonic() >= self._rests_until
                if took_s is None or (took_s <= QUICK_S and has_rested):
                    # Without a connection nothing is known: the next one is measured when it is
                    # established.
                    self._took_s = 0.0
                    self._thread = None
                    return
            wait_s = PROBE_S
            if QUICK_S < took_s < math.inf:
                self._took_s = took_s
                wait_s -= took_s
