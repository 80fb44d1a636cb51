"""The request that the current code works for: its id, and its span if it is traced. Follows tasks
and threads as contextvars do.

Without tracing there is no tracer; a `step` then costs one look-up of a contextvar.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from lmcache_core.telemetry.tracing import Span, Tracer

REQUEST_ID_HEADER: Final = "x-request-id"
TRACEPARENT_HEADER: Final = "traceparent"
MAX_REQUEST_ID_CHARS: Final = 128
MAX_TRACEPARENT_CHARS: Final = 55

_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:/+=-]{{1,{MAX_REQUEST_ID_CHARS}}}", re.ASCII)
_TRACEPARENT: Final = re.compile(
    r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII
)
_NOTHING: Final = nullcontext()


class Carried(NamedTuple):
    """Context that is passed with a request to another process.

    Attributes:
        request_id: "" for none.
        traceparent: "" for none.
    """

    request_id: str = ""
    traceparent: str = ""

    @classmethod
    def checked(cls, request_id: str, traceparent: str) -> Carried:
        """Return what a client sent, without malformed parts: it is logged and forwarded."""
        return cls(
            request_id if _REQUEST_ID.fullmatch(request_id) else "",
            traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        )

    def headers(self) -> dict[str, str]:
        """Return both as HTTP headers."""
        named = {REQUEST_ID_HEADER: self.request_id, TRACEPARENT_HEADER: self.traceparent}
        return {name: value for name, value in named.items() if value}


class _Work(NamedTuple):
    request_id: str
    span: Span | None


_CURRENT: Final[ContextVar[_Work | None]] = ContextVar("lmcache_work", default=None)


class RequestIds:
    """Generates request ids of 32 hex digits: a random prefix, and a count. Thread-safe.

    Generating each at random would cost more than everything else. They identify requests in logs;
    guessing one gives access to nothing.
    """

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(10)
        self._counts = itertools.count(1)

    def next(self) -> str:
        """Return a new id."""
        return f"{self._prefix}{next(self._counts):012x}"


def current_request_id() -> str:
    """Return the id of the current request, "" for none."""
    work = _CURRENT.get()
    return "" if work is None else work.request_id


def carried() -> Carried | None:
    """Return the context to pass with a request made here; None if there is none, as always without
    a trace or an id.
    """
    work = _CURRENT.get()
    if work is None:
        return None
    return Carried(work.request_id, "" if work.span is None else work.span.traceparent)


def working_for(
    name: str, came: Carried | None, tracer: Tracer | None, *, is_server: bool = True
) -> AbstractContextManager[None]:
    """Return a context manager whose body works for that request. Enter it once.

    Args:
        came: Context received with the request.
        tracer: Begins its span; None: no tracing.
        is_server: Whether another process made the request.
    """
    request_id, traceparent = came or Carried()
    return _Inside(
        request_id,
        None if tracer is None else partial(tracer.begin, name, traceparent, is_server=is_server),
    )


def step(name: str) -> AbstractContextManager[None]:
    """Return a context manager for a part of the current work, with its own span if traced."""
    work = _CURRENT.get()
    if work is None or work.span is None:
        return _NOTHING
    return _Inside(work.request_id, partial(work.span.child, name))


class _Inside:
    """Work from its beginning to its end. Not a generator: this is entered for every request."""

    __slots__ = ("_before", "_begin", "_request_id", "_span")

    def __init__(self, request_id: str, begin: Callable[[], Span] | None) -> None:
        self._request_id = request_id
        self._begin = begin

    def __enter__(self) -> None:
        self._span = None if self._begin is None else self._begin()
        self._before = _CURRENT.set(_Work(self._request_id, self._span))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CURRENT.reset(self._before)
        if self._span is not None:
            self._span.end(kind is not None)
