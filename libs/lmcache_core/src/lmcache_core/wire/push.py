"""Chunks on their way to a server, several at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk
from lmcache_core.wire.connection import Call, ClientConnection
from lmcache_core.wire.frames import FrameType
from lmcache_core.wire.messages import Handover, Message, Put, PutOk

Announce = Callable[[Chunk], Message]


def as_put(chunk: Chunk) -> Message:
    """The message that stores a chunk."""
    return Put()


def as_handover(may_evict: bool) -> Announce:
    """The messages that hand chunks over, as `Handover` says."""

    def announce(chunk: Chunk) -> Message:
        age_s = 0.0 if chunk.stored_at is None else max(0.0, time.time() - chunk.stored_at)
        return Handover(chunk.key.tenant, int(age_s * 1000), may_evict)

    return announce


class Push:
    """Sends chunks over one connection.

    Args:
        connection: Open.
        window: Chunks on their way without an answer, at most.
        name: The server, for messages.
    """

    def __init__(self, connection: ClientConnection, window: int, name: str) -> None:
        self._connection = connection
        self._window = window
        self._name = name
        self._unanswered: deque[Call] = deque()

    async def run(self, chunks: Sequence[Chunk], announce: Announce, deadline: float) -> list[bool]:
        """Send chunks (borrowed). True: the server has the whole, verified chunk.

        Args:
            chunks: What is sent.
            announce: Gives the message of each.
            deadline: Time of the event loop.

        Raises:
            UnavailableError: The connection is lost, or the answers have not come by the deadline.
            AuthenticationError: The server refused.
        """
        stored: list[bool] = []
        try:
            async with asyncio.timeout_at(deadline):
                for chunk in chunks:
                    if len(self._unanswered) >= self._window:
                        stored.append(await self._answer())
                    message = announce(chunk)
                    self._unanswered.append(
                        await self._connection.start(
                            message, FrameType.PUT_OK, chunk.head, chunk.memory.byte_array
                        )
                    )
                while self._unanswered:
                    stored.append(await self._answer())
        except TimeoutError:
            for call in self._unanswered:
                self._connection.expire(call)
            raise UnavailableError(
                f"{self._name}: {len(chunks) - len(stored)} of {len(chunks)} chunks not stored in"
                " time"
            ) from None
        except BaseException:
            for call in self._unanswered:
                self._connection.abandon(call)
            raise
        return stored

    async def _answer(self) -> bool:
        answer = await self._connection.next_item(self._unanswered[0])
        self._unanswered.popleft()
        return isinstance(answer, PutOk) and answer.stored
