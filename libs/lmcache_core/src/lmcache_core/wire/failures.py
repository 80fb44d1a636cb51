"""What says that the other side of a connection cannot be reached: one table for all transports.

A transport runs what may fail inside `reaching`; its callers then handle `UnavailableError` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from lmcache_core.errors import UnavailableError

LATE: Final = (TimeoutError, BlockingIOError)
"""A deadline has passed; the connection may still be good."""

BROKEN: Final = (
    OSError,  # refused, reset, unknown host, TLS; and all of `LATE`
    UnicodeError,  # a host name that cannot be encoded
)


@contextmanager
def reaching(
    place: str,
    *kinds: type[Exception],
    why: Callable[[Exception], str] = str,
    close: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Raise `UnavailableError` for whatever is in `BROKEN` or of these kinds.

    Args:
        place: Name of the other side, with which the error begins.
        kinds: What else the transport's library raises if it cannot reach the other side.
        why: Returns the rest of the error's text; "" for a deadline that has passed.
        close: Called before the error is raised.
    """
    failures: tuple[type[Exception], ...] = (*BROKEN, *kinds)
    try:
        yield
    except failures as exc:
        close()
        raise UnavailableError(f"{place}: {why(exc) or 'no answer in time'}") from exc
