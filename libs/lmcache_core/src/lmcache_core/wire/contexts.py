"""Whose requests those of a connection are, as its client says by CONTEXT frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lmcache_core.errors import ProtocolError
from lmcache_core.telemetry.request_context import Carried, Tracer, working_for
from lmcache_core.wire import messages
from lmcache_core.wire.frames import FrameHeader, FrameType
from lmcache_core.wire.served import ServerLimits
from lmcache_core.wire.stream import FrameStream

logger = logging.getLogger(__name__)


class Contexts:
    """What came along with the next request of a connection.

    Args:
        stream: The connection.
        limits: The server's.
        tracer: Traces requests; None: nobody does.
    """

    def __init__(self, stream: FrameStream, limits: ServerLimits, tracer: Tracer | None) -> None:
        self._stream = stream
        self._limits = limits
        self._tracer = tracer
        self._came: Carried | None = None

    async def take(self, header: FrameHeader, last_id: int) -> None:
        """Read a CONTEXT frame.

        Raises:
            ProtocolError: It belongs to a request that has been.
        """
        if header.correlation_id <= last_id:
            raise ProtocolError(
                f"CONTEXT {header.correlation_id} behind {last_id} belongs to no request"
            )
        async with asyncio.timeout(self._limits.transfer_s(0)):
            message = await self._stream.read_message(header)
        assert isinstance(message, messages.Context)
        self._came = Carried.checked(message.request_id, message.traceparent)

    def work(self, kind: FrameType) -> AbstractContextManager[None]:
        """For the next request, in which it is to be answered."""
        came, self._came = self._came, None
        if came is None and self._tracer is None:
            return nullcontext()
        return _told(f"lm {kind.name}", came, self._tracer)


@contextmanager
def _told(name: str, came: Carried | None, tracer: Tracer | None) -> Iterator[None]:
    with working_for(name, came, tracer):
        yield
        logger.debug("%s is answered", name)
