"""A bound on the TLS handshakes of a listener that are underway: the protocols above see a
connection only when its handshake is over.
"""

from __future__ import annotations

import logging
import ssl
import time
import weakref
from typing import Any, Final

from lmcache_core._typing import override

logger = logging.getLogger(__name__)

MAX_HANDSHAKES: Final = 256
"""Underway on one listener. Honest clients need milliseconds each."""
MAX_HANDSHAKE_S: Final = 60.0
"""What event loops give a handshake that they are told nothing else of."""
MARGIN_S: Final = 1.0
LOG_INTERVAL_S: Final = 60.0


class CountedObject(ssl.SSLObject):
    """The TLS side of a connection, whose handshake counts for its listener if that has a bound."""

    listener: BoundedContext | None = None
    began_at: float | None = None

    def do_handshake(self) -> None:
        """Go on with the handshake. The first call raises `ssl.SSLError` where too many are
        underway.
        """
        if self.listener is not None and self.began_at is None:
            self.began_at = time.monotonic()
            self.listener.begin(self)
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        if self.listener is not None:
            self.listener.end(self)


class BoundedContext(ssl.SSLContext):
    """The context of one listener: handshakes above its bound fail at once, and their connections
    end.

    Connections whose handshake is over do not count, nor do those that went away in the middle of
    it.
    """

    _context: ssl.SSLContext
    _max_handshakes: int
    _underway: weakref.WeakSet[CountedObject]
    _max_s: float
    _logged_at: float

    def __new__(
        cls,
        context: ssl.SSLContext,
        max_handshakes: int = MAX_HANDSHAKES,
        max_s: float = MAX_HANDSHAKE_S,
    ) -> BoundedContext:
        """Bound the handshakes of a listener.

        Args:
            context: Of `server_context`; other listeners may have it, too, each with a bound of its
                own.
            max_handshakes: Underway at once.
            max_s: How long the listener lets one take. One that began before that is over, though
                its object may still be there.
        """
        bounded = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        bounded._context = context
        bounded._max_handshakes = max_handshakes
        bounded._underway = weakref.WeakSet()
        bounded._max_s = max_s + MARGIN_S
        bounded._logged_at = float("-inf")
        return bounded

    @override
    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        made = self._context.wrap_bio(*args, **kwargs)
        assert isinstance(made, CountedObject), "the context is of server_context"
        made.listener = self
        return made

    def begin(self, handshake: CountedObject) -> None:
        """Count a handshake, or raise `ssl.SSLError`, the only exception that event loops take
        for an answer.
        """
        now = time.monotonic()
        if len(self._underway) >= self._max_handshakes:
            for other in list(self._underway):
                if other.began_at is None or now - other.began_at > self._max_s:
                    self._underway.discard(other)
        if len(self._underway) >= self._max_handshakes:
            if now - self._logged_at >= LOG_INTERVAL_S:
                self._logged_at = now
                logger.warning(
                    "%d TLS handshakes are underway on one listener: further connections end at"
                    " once",
                    self._max_handshakes,
                )
            raise ssl.SSLError("too many TLS handshakes are underway")
        self._underway.add(handshake)

    def end(self, handshake: CountedObject) -> None:
        """End a handshake."""
        self._underway.discard(handshake)

    @property
    def num_underway(self) -> int:
        """Handshakes underway."""
        return len(self._underway)
