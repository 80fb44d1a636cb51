"""Learns how fast the serving engine computes KV, and so what loading a chunk saves."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from lmcache_core.forks import enter_children

RISE = 0.5
FALL = 0.05
"""A faster prefill than estimated is adopted immediately (deadlines become shorter, which is safe);
a slower one may be due to queueing.
"""
MAX_OPEN_PREFILLS = 256
MAX_PREFILL_S = 60.0
MIN_PREFILL_S = 5e-3
"""No model worth a cache is faster: a higher rate means that the KV had been computed before."""
MIN_PREFILL_TOKENS = 32
"""Fewer tokens reveal the fixed cost of a prefill rather than its rate."""


class PrefillRate:
    """Tokens per second, configured or learned. Thread-safe.

    It learns from the engine's own calls: between the `retrieve` that misses a chunk and the
    `store` that brings it, the serving engine computed the tokens from there on. Queueing makes
    that time longer than the prefill, never shorter.

    Args:
        tokens_per_s: Configured rate; None to learn it.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, tokens_per_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._configured = tokens_per_s
        self._clock = clock
        self._learned: float | None = None
        self._open: OrderedDict[Hashable, float] = OrderedDict()
        self.enter_child()
        enter_children(self)

    def enter_child(self) -> None:
        """Learn with a new lock."""
        self._lock = threading.Lock()

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None while unknown."""
        return self._configured if self._configured is not None else self._learned

    def recompute_s(self, num_tokens: int) -> float | None:
        """Return the seconds that computing `num_tokens` takes; None while unknown."""
        rate = self.tokens_per_s
        return None if rate is None else num_tokens / rate

    def note(self, num_tokens: int, elapsed_s: float) -> None:
        """Learn that the serving engine computed `num_tokens` in `elapsed_s`."""
        if num_tokens < MIN_PREFILL_TOKENS or not MIN_PREFILL_S <= elapsed_s <= MAX_PREFILL_S:
            return
        rate = num_tokens / elapsed_s
        with self._lock:
            if self._learned is None:
                self._learned = rate
            else:
                self._learned += (RISE if rate > self._learned else FALL) * (rate - self._learned)

    def missed(self, key: Hashable) -> None:
        """Record a retrieve that found everything before this chunk but not the chunk itself: the
        serving engine begins to compute it.
        """
        with self._lock:
            self._open[key] = self._clock()
            self._open.move_to_end(key)
            if len(self._open) > MAX_OPEN_PREFILLS:
                self._open.popitem(last=False)

    def is_open(self, key: Hashable) -> bool:
        """Return whether this chunk was missed and has not been stored since."""
        return key in self._open

    def stored(self, key: Hashable, num_tokens: int) -> None:
        """Record a store that begins with this chunk and brings `num_tokens`."""
        with self._lock:
            began = self._open.pop(key, None)
        if began is not None:
            self.note(num_tokens, self._clock() - began)
