"""JSON over HTTP to one of our services: one call per method, bounded in time and size; every
failure is an `UnavailableError`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import httpx
import msgspec

from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.security import ShownToken, why_silent
from lmcache_core.wire.failures import reaching
from lmcache_core.wire.http_client import BearerAuth, context_for, http_client

T = TypeVar("T")

_HUNG_UP: Final = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)

MAX_ATTEMPTS: Final = 3
MAX_RESPONSE_BYTES: Final = 64 << 20
MAX_CONNECTIONS: Final = 16
MAX_SHOWN_CHARS: Final = 200


class _Problem(msgspec.Struct):
    title: str = ""
    detail: str = ""


class Reply(NamedTuple):
    """A response with any status."""

    status: int
    data: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is a success."""
        return 200 <= self.status < 300


class JsonHttpClient:
    """A connection pool for one service. The constructor does no I/O; `open` and `close` belong to
    the owner.

    Args:
        service: Name of the service in errors, for example `lookup`.
        base_url: `http://host:port` or `https://host:port`, without credentials.
        token: Bearer token; None if the service requires none; a token file is re-read when it
            changes.
        timeout_s: Limit on each call without its own, from connecting to the last byte.
        transport: Replaces the network in tests.
        tls: Trusted authorities and client certificate for https; None: the system's authorities.

    Raises:
        ConfigError: `base_url` is not of that form, or `token` is not a valid header value.
    """

    def __init__(
        self,
        service: str,
        base_url: str,
        token: ShownToken,
        timeout_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._auth = BearerAuth(token, service)
        self._name = f"{service} {check_base_url(service, base_url)}"
        self._base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._transport = transport
        self._tls = context_for(base_url, tls)
        self._client: httpx.AsyncClient | None = None
        self._was_answered = False

    async def open(self) -> None:
        """Create the connection pool, without connecting yet."""
        if self._client is not None:
            return
        self._client = http_client(
            self._base_url,
            self._auth,
            self.timeout_s,
            self._tls,
            httpx.Limits(max_connections=MAX_CONNECTIONS),
            self._transport,
            {"accept": "application/json"},
        )

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        *,
        timeout_s: float | None = None,
        absent_ok: bool = False,
    ) -> bytes:
        """Make one call.

        Args:
            path: Path below the base URL.
            absent_ok: Whether status 404 is also a success.

        Returns:
            The body of the response.

        Raises:
            UnavailableError: No response in time, one that is too long, or a refusal.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        reply = await self.exchange(method, path, content, headers, timeout_s=timeout_s)
        if reply.is_success or (absent_ok and reply.status == 404):
            return reply.data
        raise self.refused(reply)

    async def exchange(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Make one call with any body, and return any response.

        A replica that shuts down closes its idle connections, possibly while a call is on its way.
        Such a call is repeated on another connection within the same limit: all of our calls are
        safe to repeat.

        Args:
            path: Path below the base URL.
            headers: Added to those of every call, or replacing them.

        Raises:
            UnavailableError: No response in time, or one that is too long.
        """
        if self._client is None:
            raise UnavailableError(f"{self._name}: the client is not open")
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with reaching(self._name, httpx.HTTPError, httpx.InvalidURL, why=self._why):
            async with asyncio.timeout(limit_s):
                for attempt in range(MAX_ATTEMPTS):
                    try:
                        async with self._client.stream(
                            method, path, content=content, headers=headers, timeout=limit_s
                        ) as response:
                            data = await self._read(response)
                        break
                    except _HUNG_UP:
                        if attempt + 1 == MAX_ATTEMPTS or not self._was_answered:
                            raise
        self._was_answered = True
        return Reply(response.status_code, data)

    def refused(self, reply: Reply) -> UnavailableError:
        """Return the error for a refusal, with the reason that the response states."""
        return UnavailableError(
            f"{self._name}: status {reply.status} {_reason(reply.data)}".rstrip()
        )

    def decode(self, data: bytes, kind: type[T]) -> T:
        """Decode the body of a response, checking every bound that `kind` states.

        Raises:
            UnavailableError: It is not a valid `kind`.
        """
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise self.unusable(str(exc)) from exc

    def unusable(self, why: str) -> UnavailableError:
        """Return the error for a malformed response."""
        return UnavailableError(f"{self._name}: unusable answer: {why}")

    def _why(self, exc: Exception) -> str:
        is_silent = isinstance(exc, _HUNG_UP) and not self._was_answered
        return f"{type(exc).__name__} {exc}".rstrip() + (why_silent(self._tls) if is_silent else "")

    async def _read(self, response: httpx.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self.unusable("it is compressed, which was not requested")
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > MAX_RESPONSE_BYTES:
                raise self.unusable(f"it is longer than {MAX_RESPONSE_BYTES} bytes")
        return bytes(data)


def check_base_url(service: str, base_url: str) -> str:
    """Return `base_url` if it is valid. Errors do not repeat it: it may contain a password."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"{service} URL: {exc}; write http://host:port") from exc
    if (
        url.scheme not in ("http", "https")
        or not url.host
        or url.userinfo
        or url.query
        or url.fragment
    ):
        raise ConfigError(
            f"{service} URL: must be http://host:port, without credentials; the token is"
            " a separate setting"
        )
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise ConfigError(f"{service} URL: port {url.port} must be in 1 … 65535")
    return base_url


def _reason(data: bytes) -> str:
    """Return the reason in a problem document, quoted and shortened: it goes into logs."""
    try:
        problem = msgspec.json.decode(data, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return repr((problem.detail or problem.title)[:MAX_SHOWN_CHARS])
