"""Pipelines to one Redis server, or to the one that sentinels name.

redis-py opens the connections: it authenticates, speaks TLS, and finds the server through
sentinels; here TLS files and passwords are re-read for each connection. Commands are packed and
replies read here, which takes half the time of redis-py's own pipelines (ADR 20).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import hiredis
import redis.asyncio as redis_asyncio
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.security.tls import ReloadingContext, TlsFiles, client_context
from lmcache_core.storage.remote.redis import SteadySentinels
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as LostConnectionError

from lmcache_servicekit.errors import StoreRefusedError
from lmcache_servicekit.redis_settings import Address, RedisSettings, RedisUrl, unreadable
from lmcache_servicekit.settings import read_secret_file

T = TypeVar("T")
Argument = bytes | str | int

MAX_CONNECTIONS: Final = 64
# Everything that redis-py and the sockets below it raise.
CLIENT_ERRORS: Final = (RedisError, RedisClusterException, OSError, TimeoutError)


class TlsConnection(SSLConnection):
    """A connection over TLS that reads its files whenever it is opened; redis-py's own reads them
    once.
    """

    def __init__(self, tls: ReloadingContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context = _Given(tls)  # type: ignore[assignment]


class SentinelTlsConnection(TlsConnection, SentinelManagedSSLConnection):
    """A connection over TLS to the server that sentinels name."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Replaces redis-py's factory of contexts by a given context."""

    context: ReloadingContext

    def get(self) -> ReloadingContext:
        return self.context


class SentinelLogin(CredentialProvider):
    """Reads the password of the sentinels for each new connection. While the file cannot be read,
    the last password remains in use.

    Args:
        username: User name; None for the default user.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """

    def __init__(self, password_file: Path, username: str | None = None) -> None:
        self._password_file = password_file
        self._username = username
        self._password = self._read()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the arguments of `AUTH`."""
        # During a rotation the sentinels decide whether the last one is still valid.
        with contextlib.suppress(ConfigError):
            self._password = self._read()
        return (self._password,) if self._username is None else (self._username, self._password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same, reading the file in a thread."""
        return await asyncio.to_thread(self.get_credentials)

    def _read(self) -> str:
        password = read_secret_file(self._password_file, "redis_sentinel_password_file")
        assert password is not None
        return password


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Address and credentials of Redis.

    Attributes:
        tls: Trusted authorities and client certificate. Each new connection reads the files.
        login: Credentials for sentinels; None: none.
    """

    url: RedisUrl
    tls: TlsFiles
    login: SentinelLogin | None = None

    @classmethod
    def of(cls, settings: RedisSettings) -> RedisAccess | None:
        """Create it from settings; None if they name no Redis.

        Raises:
            ConfigError: The URL or the file of the sentinels' password cannot be read.
        """
        if settings.redis_url is None:
            return None
        login = None
        if settings.redis_sentinel_password_file is not None:
            login = SentinelLogin(
                settings.redis_sentinel_password_file, settings.redis_sentinel_username
            )
        return cls.parse(settings.redis_url.get_secret_value(), settings.redis_tls, login)

    @classmethod
    def parse(
        cls, url: str, tls: TlsFiles | None = None, login: SentinelLogin | None = None
    ) -> RedisAccess:
        """Parse `url`.

        Raises:
            ConfigError: It cannot be read. The message does not repeat it: it may hold a password.
        """
        return cls(RedisUrl.parse(url), tls or TlsFiles(), login)

    def server(
        self, timeout_s: float, max_connections: int
    ) -> tuple[redis_asyncio.Redis, list[redis_asyncio.Redis]]:
        """Return a client of the one server, or of the one that the sentinels name, and the clients
        of the sentinels. The caller closes all of them. Does not connect.

        Raises:
            ConfigError: The URL or a file for TLS cannot be read.
        """
        limits = _limits(timeout_s, max_connections)
        try:
            if self.url.has_sentinels:
                return self._server_of_sentinels(limits, timeout_s)
            # For a URL with TLS, redis-py would open connections that never re-read their files.
            pool = redis_asyncio.ConnectionPool.from_url(
                self.url.without_tls, **self._tls(TlsConnection), **limits
            )
        except ConfigError:
            raise
        except ValueError:
            raise unreadable() from None
        return redis_asyncio.Redis.from_pool(pool), []

    def members(
        self, timeout_s: float, max_connections: int
    ) -> Callable[[Address], redis_asyncio.Redis]:
        """Return the factory of clients for single servers of the cluster. Does not connect.

        Raises:
            ConfigError: A file for TLS cannot be read.
        """
        options = {
            **self._credentials(),
            **self._tls(TlsConnection),
            **_limits(timeout_s, max_connections),
        }
        return lambda address: _client_of(address, options)

    def _server_of_sentinels(
        self, limits: dict[str, Any], timeout_s: float
    ) -> tuple[redis_asyncio.Redis, list[redis_asyncio.Redis]]:
        asking = {**limits, "socket_timeout": timeout_s, "credential_provider": self.login}
        sentinels = SteadySentinels([])  # type: ignore[no-untyped-call]
        sentinels.sentinels = [
            _client_of(address, {**self._tls(TlsConnection), **asking})
            for address in self.url.addresses
        ]
        options = {**self._credentials(), **self._tls(SentinelTlsConnection), **limits}
        client: redis_asyncio.Redis = sentinels.master_for(self.url.service, **options)
        return client, list(sentinels.sentinels)

    def _credentials(self) -> dict[str, Any]:
        user, password = self.url.credentials
        return {"username": user, "password": password}

    def _tls(self, connection_class: type[TlsConnection]) -> dict[str, Any]:
        if not self.url.has_tls:
            return {}
        return {"connection_class": connection_class, "tls": client_context(self.tls)}


def describe_failure(where: str, error: BaseException, timeout_s: float) -> str:
    """Describe a failure without the error's own text, which may contain credentials.

    Args:
        where: Hosts and ports, from `RedisUrl.where`.
        error: Raised by redis-py or the sockets below it.
    """
    if isinstance(error, TimeoutError):
        return f"{where} does not answer within {timeout_s:g} s"
    if isinstance(error, AuthenticationError):
        return f"{where} refuses user or password"
    if not isinstance(error, ResponseError):
        return f"{where} cannot be reached ({type(error).__name__})"
    if isinstance(error, OutOfMemoryError) or "OOM" in str(error):
        return f"{where} is full: it refuses writes until maxmemory is raised or keys are removed"
    if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
        return f"{where} is read-only: give the address of a master"
    return f"{where} refuses a command ({type(error).__name__})"


def _limits(timeout_s: float, max_connections: int) -> dict[str, Any]:
    """Bound connecting and the number of connections. Each call has its caller's deadline, and is
    repeated by `redis_client`.
    """
    return {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": timeout_s,
        "socket_timeout": None,
        "max_connections": max_connections,
    }


def _client_of(address: Address, options: dict[str, Any]) -> redis_asyncio.Redis:
    host, port = address
    return redis_asyncio.Redis.from_pool(
        redis_asyncio.ConnectionPool(host=host, port=port, **options)
    )


class Script:
    """A Lua script."""

    def __init__(self, text: str) -> None:
        self.text = text
        # Redis identifies scripts this way; nothing depends on the digest being hard to forge.
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisCommand(NamedTuple):
    """A command, or a call of a script.

    Attributes:
        key: One of its keys: all are in one hash slot.
        words: Name and arguments, or those of a script's call without its name; empty if `packed`
            is given.
        script: The script to call.
        packed: The whole command as sent.
    """

    key: str
    words: tuple[Argument, ...]
    script: Script | None = None
    packed: bytes = b""

    def short(self) -> bytes:
        """Return the first form to send: a script is called by its digest."""
        if self.packed:
            return self.packed
        return _pack(
            self.words if self.script is None else ("EVALSHA", self.script.digest, *self.words)
        )

    def full(self) -> bytes:
        """Return the form for a server that has lost the script."""
        if self.script is None:
            return self.short()
        return _pack(("EVAL", self.script.text, *self.words))


def call(script: Script, keys: Sequence[str], argv: Sequence[Argument]) -> RedisCommand:
    """Return a script's call with keys of one hash slot, at least one."""
    return RedisCommand(keys[0], (len(keys), *keys, *argv), script)


class RedisNode:
    """Sends commands to one server, over the connections of a redis-py client that belongs to this
    object. The constructor does not connect.

    Every command must be safe to send twice.

    Args:
        sentinels: Clients of the sentinels that name it, which also belong to this object.
    """

    def __init__(
        self, client: redis_asyncio.Redis, sentinels: Sequence[redis_asyncio.Redis] = ()
    ) -> None:
        self._clients = (client, *sentinels)
        self._pool = client.connection_pool
        # One more connection would be refused, so callers wait here.
        self._places = asyncio.Semaphore(self._pool.max_connections)
        self._num_calls = 0

    @property
    def is_idle(self) -> bool:
        """Whether no call waits or is underway."""
        return self._num_calls == 0

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.aclose()

    async def exchange(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send commands in one round trip, and in a second one the scripts that the server has
        lost.

        Returns:
            A reply for each command, a `ResponseError` if the server refuses.

        Raises:
            RedisError, OSError: The connection failed; the commands may have been executed.
        """
        self._num_calls += 1
        try:
            async with self._places:
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

    async def ask(self, command: RedisCommand) -> Any:
        """Send a command to a server that is still importing its slot. Returns and raises as
        `exchange`.
        """
        asking = RedisCommand("", ("ASKING",))
        return (await self.exchange([asking, command._replace(packed=command.full())]))[1]

    async def _send(self, requests: Sequence[bytes]) -> list[Any]:
        # A connection lost before the first reply is replaced once: the pool may hold connections
        # broken by a restart.
        for is_last in (False, True):
            answers: list[Any] = []
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.send_packed_command(b"".join(requests), check_health=False)
                while len(answers) < len(requests):
                    answers.append(await _read_one(connection))
                    await _read_arrived(connection, answers, len(requests))
                return answers
            except LostConnectionError:
                if is_last or answers:
                    raise
            finally:
                if len(answers) < len(requests):
                    # Later replies on it would be taken for those of another request.
                    await connection.disconnect(nowait=True)
                await self._pool.release(connection)
        raise AssertionError("the loop returns or raises")


class RedisClient:
    """Runs commands and scripts on one server. The constructor does not connect.

    Args:
        node: The server, which belongs to this object.
        where: Name of this Redis, for display.
    """

    def __init__(self, node: RedisNode, where: str) -> None:
        self._node = node
        self.where = where

    async def close(self) -> None:
        """Close all connections."""
        await self._node.close()

    async def ping(self, key: str) -> None:
        """Check that every server responds, and that a cluster can read `key`, which it refuses
        while slots are missing. Raises as `many`.
        """
        await self.many([RedisCommand(key, ("PING",))])

    async def many(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Run independent commands in one round trip to each server.

        A command, but not a script, returns None if its key holds a value of another type.

        Raises:
            ResponseError: One was refused, after all were answered.
            RedisError, OSError: One was not answered; it may have been executed.
        """
        return checked(commands, await self._node.exchange(commands))

    async def run(self, script: Script, keys: Sequence[str], argv: Sequence[Argument]) -> Any:
        """Run a script whose keys are in one hash slot. Raises as `many`."""
        return (await self.many([call(script, keys, argv)]))[0]

    async def within(self, timeout_s: float, work: Awaitable[T]) -> T:
        """Await commands for at most `timeout_s`, and describe a failure in words.

        Raises:
            StoreRefusedError: Redis answered, and refused.
            UnavailableError: Redis failed, or did not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except CLIENT_ERRORS as exc:
            text = describe_failure(self.where, exc, timeout_s)
            raise (
                StoreRefusedError(text)
                if isinstance(exc, ResponseError)
                else UnavailableError(text)
            ) from exc


def checked(commands: Sequence[RedisCommand], answers: Sequence[Any]) -> list[Any]:
    """Return replies, with None for commands on a value of another type.

    Raises:
        ResponseError: One was refused.
    """
    found = []
    for command, answer in zip(commands, answers, strict=True):
        if isinstance(answer, ResponseError):
            if command.script is not None or not str(answer).startswith("WRONGTYPE"):
                raise answer
            answer = None
        found.append(answer)
    return found


def _pack(words: tuple[Argument, ...]) -> bytes:
    # redis-py's own packing takes much longer. hiredis' types accept only tuples of one word.
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed


async def _read_one(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        return exc


async def _read_arrived(connection: Any, answers: list[Any], num_wanted: int) -> None:
    """Append replies that arrived together with the last one.

    redis-py takes longer to read one reply than to do everything else, so its parser is called
    directly. redis-py does not guarantee that interface: with another parser, `_read_one` reads
    them.
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
            # As redis-py does with a first reply: a new connection asks the sentinels again.
            raise LostConnectionError("the server is no longer a master")
        if isinstance(answer, hiredis.PushNotification):
            await parser.handle_push_response(answer)
        elif type(answer) is object:  # more bytes are needed
            return
        else:
            answers.append(answer)
