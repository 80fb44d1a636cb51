"""Requests that follow one another on one Redis connection, answered while later ones are on
their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import redis.asyncio as redis
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import ResponseError

from lmcache_core.concurrency import cancel_and_join

MAX_AHEAD = 256
"""Requests without an answer, at most."""
SLICE_BYTES = 1 << 20
"""What is copied and handed to the event loop at once: large enough, and still in the
processor's cache when it is sent.
"""

Request = Sequence[bytes | memoryview]
OnAnswer = Callable[[int, Any], Awaitable[None]]


async def exchange(
    client: redis.Redis,
    requests: Sequence[Request],
    num_ahead: Callable[[], int],
    on_answer: OnAnswer,
) -> None:
    """Send requests over one connection and hand each answer over as it comes: one round trip
    altogether, and no more answers in memory than the one that is read and the one that is being
    dealt with.

    A connection that was lost before anything was answered is replaced once; requests are therefore
    such as may be sent twice.

    Args:
        client: Whose connections are used.
        requests: Encoded.
        num_ahead: How many may be without an answer, asked again and again; 1 to `MAX_AHEAD` are.
        on_answer: Given the number of the request and its answer, a `ResponseError` where Redis
            refuses; never called for two at once.

    Raises:
        RedisError: The connection failed.
    """
    pool = client.connection_pool
    for is_last in (False, True):
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        dealing = _Dealing(on_answer)
        try:
            await _run(connection, requests, num_ahead, dealing)
            return
        except LostConnectionError:
            if is_last or dealing.num_answers:
                raise
        finally:
            try:
                await dealing.close()
            finally:  # also when a second deadline passes meanwhile: the pool has few connections
                if dealing.num_answers < len(requests):
                    await connection.disconnect(
                        nowait=True
                    )  # what else comes on it answers nobody's question
                await pool.release(connection)


class _Dealing:
    """Answers that are dealt with one by one, beside the reading of the next."""

    def __init__(self, on_answer: OnAnswer) -> None:
        self._on_answer = on_answer
        self._task: asyncio.Future[None] | None = None
        self.num_answers = 0

    async def take(self, answer: Any) -> None:
        await self.join()
        self._task = asyncio.ensure_future(self._on_answer(self.num_answers, answer))
        self.num_answers += 1

    async def join(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            try:
                await task
            finally:
                task.cancel()

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_join([self._task])


async def _run(
    connection: Any, requests: Sequence[Request], num_ahead: Callable[[], int], dealing: _Dealing
) -> None:
    num_sent = 0
    for i in range(len(requests)):
        while num_sent < len(requests) and num_sent - i < min(max(num_ahead(), 1), MAX_AHEAD):
            for piece in _slices(requests[num_sent]):
                await connection.send_packed_command([piece], check_health=False)
            num_sent += 1
        try:
            answer = await connection.read_response(disable_decoding=True)
        except ResponseError as exc:
            answer = exc
        await dealing.take(answer)
        del answer
    await dealing.join()


def encoded(*words: bytes | str | int | Sequence[bytes | memoryview]) -> Request:
    """A command in Redis' protocol; a sequence of buffers is one word, and none of them is
    copied.
    """
    request: list[bytes | memoryview] = [b"*%d\r\n" % len(words)]
    for word in words:
        parts = (
            [str(word).encode()]
            if isinstance(word, str | int)
            else [word]
            if isinstance(word, bytes)
            else list(word)
        )
        request += [b"$%d\r\n" % sum(len(part) for part in parts), *parts, b"\r\n"]
    return request


def _slices(request: Request) -> Iterator[bytes]:
    """The bytes of a request: what is small put together, what is large cut into slices.

    Copies, the only ones that we make: the event loop may hold on to what it sends when the caller
    has given the memory back.
    """
    small = bytearray()
    for part in request:
        if len(small) + len(part) <= SLICE_BYTES:
            small += part
            continue
        if small:
            yield bytes(small)
            small = bytearray()
        view = memoryview(part)
        for begin in range(0, len(view), SLICE_BYTES):
            yield bytes(view[begin : begin + SLICE_BYTES])
    if small:
        yield bytes(small)
