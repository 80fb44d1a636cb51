"""Whose request this code works for: its id, and its span where it is traced. Follows tasks and threads as contextvars do.

Nothing here knows OpenTelemetry. A process that traces nothing has no tracer; then a `step` is one look at a contextvar.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Final, NamedTuple, Protocol

REQUEST_ID_HEADER: Final = "x-request-id"
TRACEPARENT_HEADER: Final = "traceparent"
MAX_REQUEST_ID_CHARS: Final = 128
MAX_TRACEPARENT_CHARS: Final = 55

_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:/+=-]{{1,{MAX_REQUEST_ID_CHARS}}}", re.ASCII)
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_NOTHING: Final = nullcontext()


class Span(Protocol):
    """A piece of work that is traced. Ended once."""

    @property
    def traceparent(self) -> str:
        """What names it to others, as the W3C writes it."""

    def child(self, name: str) -> Span:
        """Work that is a part of it, and begins now."""

    def end(self, failed: bool = False) -> None:
        """It is over."""


class Tracer(Protocol):
    """Where spans come from, and go to."""

    def begin(self, name: str, traceparent: str = "", *, is_server: bool = True) -> Span:
        """Work that begins now.

        Args:
            name: Which.
            traceparent: The work of another process that it is done for; "" for none.
            is_server: Whether it is done for another process.
        """

    def close(self) -> None:
        """Hand over what has ended, within a bounded time. Idempotent."""


class Carried(NamedTuple):
    """What goes along with a request to another process.

    Attributes:
        request_id: "" for none.
        traceparent: "" for none.
    """

    request_id: str = ""
    traceparent: str = ""

    @classmethod
    def checked(cls, request_id: str, traceparent: str) -> Carried:
        """What somebody sent, without what does not have the form of it: it goes into logs and to others."""
        return cls(
            request_id if _REQUEST_ID.fullmatch(request_id) else "",
            traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        )

    def headers(self) -> dict[str, str]:
        """As HTTP headers."""
        named = {REQUEST_ID_HEADER: self.request_id, TRACEPARENT_HEADER: self.traceparent}
        return {name: value for name, value in named.items() if value}


class _Work(NamedTuple):
    request_id: str
    span: Span | None


_CURRENT: Final[ContextVar[_Work | None]] = ContextVar("lmcache_work", default=None)


def make_request_id() -> str:
    """A new one: 32 hex digits."""
    return secrets.token_hex(16)


def current_request_id() -> str:
    """The id of the request that this code works for, "" for none."""
    work = _CURRENT.get()
    return "" if work is None else work.request_id


def carried() -> Carried | None:
    """What goes along with a request that is made here; None for nothing, as always where nothing is traced or named."""
    work = _CURRENT.get()
    if work is None:
        return None
    return Carried(work.request_id, "" if work.span is None else work.span.traceparent)


@contextmanager
def working_for(name: str, came: Carried | None, tracer: Tracer | None, *, is_server: bool = True) -> Iterator[None]:
    """Inside it, everything is done for that request.

    Args:
        name: What is done.
        came: What came along with the request.
        tracer: Begins its span; None: nothing is traced.
        is_server: Whether it is another process's request.
    """
    request_id, traceparent = came or Carried()
    span = None if tracer is None else tracer.begin(name, traceparent, is_server=is_server)
    with _inside(_Work(request_id, span)):
        yield


def step(name: str) -> AbstractContextManager[None]:
    """A part of the present work, as a span of its own where that is traced."""
    work = _CURRENT.get()
    if work is None or work.span is None:
        return _NOTHING
    return _inside(_Work(work.request_id, work.span.child(name)))


@contextmanager
def _inside(work: _Work) -> Iterator[None]:
    before = _CURRENT.set(work)
    failed = True
    try:
        yield
        failed = False
    finally:
        _CURRENT.reset(before)
        if work.span is not None:
            work.span.end(failed)
