"""Bounds the number of TLS handshakes underway on a listener: the protocols above see a connection
only after its handshake.
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
"""Handshakes underway on one listener. Honest clients need milliseconds each."""
MAX_HANDSHAKE_S: Final = 60.0
"""Default handshake timeout of event loops."""
MARGIN_S: Final = 1.0
LOG_INTERVAL_S: Final = 60.0


class CountedObject(ssl.SSLObject):
    """The TLS side of a connection, whose handshake counts towards its listener's bound, if any."""

    listener: BoundedContext | None = None
    began_at: float | None = None

    def do_handshake(self) -> None:
        """Continue the handshake. The first call raises `ssl.SSLError` if too many are underway."""
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
    """The context of one listener: handshakes above its bound fail immediately, and their
    connections end.

    Connections whose handshake has finished do not count, nor do those that disconnected in the
    middle of it.
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
            context: Created by `server_context`; other listeners may share it, each with its own
                bound.
            max_s: The listener's handshake timeout. A handshake that began earlier has ended, even
                if its object still exists.
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
        assert isinstance(made, CountedObject), "the context was not created by server_context"
        made.listener = self
        return made

    def begin(self, handshake: CountedObject) -> None:
        """Count a handshake, or raise `ssl.SSLError`, the only exception that event loops treat as
        an answer.
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
                    "too many TLS handshakes underway on one listener, refusing more: limit=%d",
                    self._max_handshakes,
                )
            raise ssl.SSLError("too many TLS handshakes are underway")
        self._underway.add(handshake)

    def end(self, handshake: CountedObject) -> None:
        """End a handshake."""
        self._underway.discard(handshake)
