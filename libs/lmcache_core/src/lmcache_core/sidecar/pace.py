"""How long the sidecar takes to answer just now."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

QUICK_S = 0.003
"""A wait of this length is never too long: an answer of a sidecar that is well takes a fraction
of it.
"""
MAX_DELAY = 0.02
"""Beyond that, an answer is worth waiting for if the wait is at most this part of what it can
save.
"""
MAX_FIRST_DELAY = 0.25
"""As long as all answers have been quick, one that is not is waited for up to this part."""
REST_PER_LOSS = 20
MAX_REST_S = 1.0
"""After a wait for nothing the sidecar is not asked for this many times that wait, so that an
unsteady one costs a few percent at most.
"""
PROBE_S = 0.25
"""Between two probes of a sidecar that is late, from question to question: one that took longer
says little about now, and may have waited for this process itself.
"""


class Pace:
    """The last known time of an answer, and a thread that asks again in the background while that
    is long. Thread-safe.

    Args:
        probe: Asks the sidecar for nothing; returns how long its answer took, infinity if it has
            not answered or could not be asked just now, None without a connection.
    """

    def __init__(self, probe: Callable[[], float | None]) -> None:
        self._probe = probe
        self._took_s = 0.0
        self._rests_until = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def is_quick(self) -> bool:
        """Return whether an answer can be expected at once."""
        return self._took_s <= QUICK_S

    def is_worth(self, saving_s: float) -> bool:
        """Return whether an answer that can save so much is worth the wait."""
        return self._took_s <= max(QUICK_S, MAX_DELAY * saving_s)

    def patience_s(self, saving_s: float) -> float:
        """Return how long to wait for a late answer that can save so much."""
        return max(QUICK_S, MAX_FIRST_DELAY * saving_s)

    def took(self, seconds: float, rest_s: float = 0.0) -> None:
        """Note that an answer took so long, or has not come for so long.

        Args:
            seconds: How long.
            rest_s: For how long not to ask again even if the sidecar is quick.
        """
        self._took_s = seconds
        if seconds > QUICK_S:
            with self._lock:
                self._rests_until = max(self._rests_until, time.monotonic() + rest_s)
                if not self._closing.is_set() and (
                    self._thread is None or not self._thread.is_alive()
                ):
                    self._thread = threading.Thread(
                        target=self._run, name="lmcache-sidecar-pace", daemon=True
                    )
                    self._thread.start()

    def wasted(self, seconds: float) -> None:
        """Note that a caller has waited so long for nothing."""
        self.took(seconds, min(REST_PER_LOSS * seconds, MAX_REST_S))

    def unsent(self, unanswered_s: float) -> None:
        """Note that a question could not be sent, while an earlier one has had no answer for so
        long.
        """
        if self.is_quick:
            # That answer may have come and not been read: the probe finds out.
            self.took(min(unanswered_s, 2 * QUICK_S))

    def close(self) -> None:
        """End the thread, after the probe that is under way. Idempotent."""
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
                # A rest may have begun while the probe was under way.
                has_rested = time.monotonic() >= self._rests_until
                if took_s is None or (took_s <= QUICK_S and has_rested):
                    # Without a connection nothing is known: the next one is measured when it is
                    # made.
                    self._took_s = 0.0
                    self._thread = None
                    return
            wait_s = PROBE_S
            if QUICK_S < took_s < math.inf:
                self._took_s = took_s
                wait_s -= took_s
