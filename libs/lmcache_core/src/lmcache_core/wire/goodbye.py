"""How a server ends a connection, and what it says when it refuses."""

from __future__ import annotations

import asyncio
import contextlib

from lmcache_core.errors import (
    AuthenticationError,
    CapacityError,
    IdentityError,
    LMCacheError,
    ProtocolError,
    UnavailableError,
    VersionError,
)
from lmcache_core.wire.messages import MAX_ERROR_CHARS, ErrorCode, ErrorMessage
from lmcache_core.wire.stream import FrameStream

GOODBYE_TIMEOUT_S = 1.0


async def say_goodbye(stream: FrameStream, message: ErrorMessage) -> None:
    """Tell the other side why its connection ends, if it listens."""
    with contextlib.suppress(UnavailableError, TimeoutError):
        async with asyncio.timeout(GOODBYE_TIMEOUT_S):
            await stream.send_message(0, message)


async def end(stream: FrameStream) -> None:
    """Send what is buffered, for a little while, and close."""
    stream.close()
    try:
        async with asyncio.timeout(GOODBYE_TIMEOUT_S):
            await stream.wait_closed()
    except TimeoutError:
        stream.abort()
        await stream.wait_closed()


def error_message(exc: LMCacheError) -> ErrorMessage:
    """The ERROR frame that tells of a refusal."""
    match exc:
        case VersionError():
            code = ErrorCode.VERSION
        case ProtocolError():
            code = ErrorCode.PROTOCOL
        case AuthenticationError():
            code = ErrorCode.AUTHENTICATION
        case IdentityError():
            code = ErrorCode.BAD_REQUEST
        case CapacityError():
            code = ErrorCode.BUSY
        case _:
            code = ErrorCode.UNAVAILABLE
    return ErrorMessage(code.value, str(exc)[:MAX_ERROR_CHARS])
