"""One Redis server, or the one that sentinels name: commands that are independent of one
another, sent together, answered in order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import hiredis
import redis.asyncio as redis_asyncio
from lmcache_core.errors import UnavailableError
from lmcache_servicekit.redis_target import describe_failure
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import (
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from lmcache_lookup.index.base import RefusedError

T = TypeVar("T")
Argument = bytes | str | int

MAX_CONNECTIONS: Final = 64

# Everything that redis-py and the sockets below it raise.
CLIENT_ERRORS: Final = (RedisError, RedisClusterException, OSError, TimeoutError)


class Script:
    """A Lua script.

    Args:
        text: Its source.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        # Redis names scripts so; nothing rests on the digest being hard to forge.
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Command(NamedTuple):
    """A command, or a call of a script.

    Attributes:
        key: One of its keys: all are of one hash slot.
        words: Name and arguments; those of a script's call without its name; nothing where it is
            packed already.
        script: What is called.
        packed: The whole command as it is sent.
    """

    key: str
    words: tuple[Argument, ...]
    script: Script | None = None
    packed: bytes = b""

    def short(self) -> bytes:
        """What is sent first: a script is called by its digest."""
        if self.packed:
            return self.packed
        return _packed(
            self.words if self.script is None else ("EVALSHA", self.script.digest, *self.words)
        )

    def full(self) -> bytes:
        """What is sent to a server that has forgotten the script."""
        return (
            self.short()
            if self.script is None
            else _packed(("EVAL", self.script.text, *self.words))
        )


def call(script: Script, keys: Sequence[str], argv: Sequence[Argument]) -> Command:
    """A script's call with keys of one hash slot, at least one."""
    return Command(keys[0], (len(keys), *keys, *argv), script)


def without_foreign(command: Command, answer: Any) -> Any:
    """The answer, or None where a value of another type than ours lies at the key.

    Scripts deal with such values themselves.
    """
    is_foreign = (
        isinstance(answer, ResponseError)
        and command.script is None
        and str(answer).startswith("WRONGTYPE")
    )
    return None if is_foreign else answer


class RedisNode:
    """Sends commands over the connections of a redis-py client, which belongs to this object. The
    constructor connects to nothing.

    All commands are such as may be sent twice.

    Args:
        client: Where to.
        companions: Clients that it asks where to, which belong to this object, too.
    """

    def __init__(
        self, client: redis_asyncio.Redis, companions: Sequence[redis_asyncio.Redis] = ()
    ) -> None:
        self._client = client
        self._companions = companions
        self._num_calls = 0
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)

    @property
    def is_idle(self) -> bool:
        """Whether no call is waiting or on its way."""
        return self._num_calls == 0

    async def close(self) -> None:
        """Close the connections."""
        for client in (self._client, *self._companions):
            await client.aclose()

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """One round trip, and another one for scripts that the server has forgotten.

        Returns:
            An answer for each command, a `ResponseError` where the server refuses.

        Raises:
            RedisError, OSError: The connection failed; what was sent may have been done.
        """
        self._num_calls += 1
        try:
            async with self._turns:
                answers = await self._send([command.short() for command in commands])
                forgotten = [
                    place
                    for place, answer in enumerate(answers)
                    if isinstance(answer, NoScriptError)
                ]
                if forgotten:
                    again = await self._send([commands[place].full() for place in forgotten])
                    for place, answer in zip(forgotten, again, strict=True):
                        answers[place] = answer
                return answers
        finally:
            self._num_calls -= 1

    async def ask(self, command: Command) -> Any:
        """Send a command to a server that is only just getting its slot. Returns and raises as
        `exchange`.
        """
        self._num_calls += 1
        try:
            async with self._turns:
                return (await self._send([_packed(("ASKING",)), command.full()]))[1]
        finally:
            self._num_calls -= 1

    async def _send(self, requests: Sequence[bytes]) -> list[Any]:
        """A connection that was lost before anything was answered is replaced once: the pool may
        hold some that a restart has cut.
        """
        pool = self._client.connection_pool
        for is_last in (False, True):
            answers: list[Any] = []
            connection = await pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.send_packed_command(b"".join(requests), check_health=False)
                while len(answers) < len(requests):
                    answers.append(await _answer_of(connection))
                    await _take_what_came(connection, answers, len(requests))
                return answers
            except LostConnectionError:
                if is_last or answers:
                    raise
            finally:
                if len(answers) < len(requests):
                    await connection.disconnect(
                        nowait=True
                    )  # what else comes on it answers nobody's question
                await pool.release(connection)
        raise AssertionError("the loop returns or raises")


async def within(where: str, timeout_s: float, work: Awaitable[T]) -> T:
    """Await `work`. Only the kind of a failure is kept, since its text may hold credentials.

    Args:
        where: What answers, for the text of errors.
        timeout_s: Limit on it.
        work: Commands.

    Raises:
        RefusedError: Redis answered, and refused.
        UnavailableError: Redis failed, or did not answer within `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except CLIENT_ERRORS as exc:
        text = describe_failure(where, exc, timeout_s)
        raise (
            RefusedError(text) if isinstance(exc, ResponseError) else UnavailableError(text)
        ) from exc


def _packed(words: tuple[Argument, ...]) -> bytes:
    """Redis-py's own packing takes much longer. The library's types know tuples of one word
    alone.
    """
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed


async def _answer_of(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        return exc


async def _take_what_came(connection: Any, answers: list[Any], num_wanted: int) -> None:
    """Append answers that have come together with the last one.

    To have redis-py read each takes twice as long as all else that it does, so its parser is asked
    for them directly. That is no promise of redis-py's: where it has another parser, the next
    answer is read as the first.
    """
    parser = getattr(connection, "_parser", None)
    reader = getattr(parser, "_reader", None)
    if parser is None or not isinstance(reader, hiredis.Reader):
        return
    while len(answers) < num_wanted:
        answer: Any = reader.gets(False)
        if isinstance(answer, LostConnectionError):
            raise answer
        if isinstance(answer, ReadOnlyError) and isinstance(connection, SentinelManagedConnection):
            # As redis-py does with a first answer: a new connection asks the sentinels again.
            raise LostConnectionError("the server is no master any more")
        if isinstance(answer, hiredis.PushNotification):
            await parser.handle_push_response(answer)
        elif type(answer) is object:  # that more has to come first
            return
        else:
            answers.append(answer)
