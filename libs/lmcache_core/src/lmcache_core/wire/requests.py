"""The start of every connection and request, over TCP and over the sidecar's socket: HELLO, the
order of requests, and the lanes and contexts that precede them. Clients send with `preface` and
`check_version`, servers read with `RequestReader`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from lmcache_core.errors import ProtocolError, VersionError
from lmcache_core.telemetry.request_context import Carried, carried
from lmcache_core.wire import messages
from lmcache_core.wire.frames import FrameHeader, FrameType
from lmcache_core.wire.lanes import KnownLanes
from lmcache_core.wire.messages import VERSION_MAX, VERSION_MIN, Message


def preface(correlation_id: int) -> bytes:
    """Return the CONTEXT frame of a request in the current context; empty if that has no id."""
    own = carried()
    if own is None:
        return b""
    context = messages.Context(own.request_id, own.traceparent)
    return messages.build_frame(correlation_id, context)


def check_version(server: str, hello: messages.Hello, answer: messages.HelloOk) -> None:
    """Refuse a server that answers HELLO with a version that was not offered.

    Raises:
        VersionError: It does.
    """
    if not hello.version_min <= answer.version <= hello.version_max:
        raise VersionError(
            f"{server} chose version {answer.version}; this client supports"
            f" {hello.version_min} to {hello.version_max}"
        )


class RequestReader:
    """Reads one connection.

    Args:
        next_header: Returns the next frame's header; None if the session accepts no more.

    Attributes:
        carried: Context of the request that `next` returned last; None without one.
    """

    def __init__(
        self,
        kinds: frozenset[FrameType],
        next_header: Callable[[], Awaitable[FrameHeader | None]],
        read_message: Callable[[FrameHeader], Awaitable[Message]],
    ) -> None:
        self._kinds = kinds
        self._next_header = next_header
        self._read_message = read_message
        self._last_id = 0
        self.lanes = KnownLanes()
        self.carried: Carried | None = None

    async def hello(self, header: FrameHeader) -> tuple[messages.Hello, int]:
        """Return the HELLO that follows this header, and the version that both sides use.

        Raises:
            ProtocolError: It is not a HELLO.
            VersionError: There is no common version.
        """
        if header.type is not FrameType.HELLO:
            raise ProtocolError(f"{header.type.name} before HELLO")
        hello = await self._read_message(header)
        assert isinstance(hello, messages.Hello)
        version = min(hello.version_max, VERSION_MAX)
        if version < max(hello.version_min, VERSION_MIN):
            raise VersionError(
                f"this server supports versions {VERSION_MIN} to {VERSION_MAX}, you"
                f" {hello.version_min} to {hello.version_max}"
            )
        self._last_id = header.correlation_id
        return hello, version

    async def next(self) -> FrameHeader | None:
        """Return the next request's header, after the frames that prepare it; None if the session
        accepts no more.

        Raises:
            ProtocolError: A frame is not a request, or out of order.
        """
        header = await self._next_header()
        while header is not None and header.type is FrameType.LANE:
            declared = await self._read_message(header)
            assert isinstance(declared, messages.DeclareLane)
            self.lanes.add(declared)
            header = await self._next_header()
        self.carried = None
        if header is not None and header.type is FrameType.CONTEXT:
            header = await self._after_context(header)
        if header is None:
            return None
        if header.type not in self._kinds or header.correlation_id <= self._last_id:
            raise ProtocolError(
                f"{header.type.name} {header.correlation_id} after {self._last_id} is not a request"
            )
        self._last_id = header.correlation_id
        return header

    async def _after_context(self, context: FrameHeader) -> FrameHeader | None:
        told = context.correlation_id
        if told <= self._last_id:
            raise ProtocolError(f"CONTEXT {told} after {self._last_id} belongs to no request")
        message = await self._read_message(context)
        assert isinstance(message, messages.Context)
        self.carried = Carried.checked(message.request_id, message.traceparent)
        header = await self._next_header()
        # Another request's id must not appear next to this one's in logs.
        if header is not None and header.correlation_id != told:
            raise ProtocolError(
                f"CONTEXT {told} before {header.type.name} {header.correlation_id}, to which it"
                " does not belong"
            )
        return header
