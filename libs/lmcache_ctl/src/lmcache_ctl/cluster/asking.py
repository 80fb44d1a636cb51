"""Asks services over REST, many at once, each with one deadline for all that it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import msgspec
from lmcache_core.errors import ConfigError
from lmcache_core.security import ShownToken, TokenFile, no_context, token_text

from lmcache_ctl.cluster.services import HOW_TO_AUTHENTICATE, Service, whose_token
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.rest import problem_text, tls_context
from lmcache_ctl.settings import CtlSettings

MAX_ASKED_AT_ONCE: Final = 64
MAX_ANSWER_BYTES: Final = 64 << 20

T = TypeVar("T")


class Answer(NamedTuple):
    """What a service answered.

    Attributes:
        status: HTTP status.
        body: Its bytes.
        clock_s: The time that it believes it is, Unix time in whole seconds; None where it does not
            say.
        seconds: How long it took.
    """

    status: int
    body: bytes
    clock_s: float | None
    seconds: float

    @property
    def phrase(self) -> str:
        """What HTTP calls that status: people do not know the numbers."""
        return f"{httpx.codes.get_reason_phrase(self.status) or 'an unknown status'!r}"

    def json(self) -> Any:
        """The body, decoded.

        Raises:
            ForeignError: It is no JSON.
        """
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ForeignError(
                "something else listens there: its answer is no JSON; correct the address"
            ) from exc


class ForeignError(CtlError):
    """What answers is no service of this cache."""


class RefusedError(CtlError):
    """A service answered with an error.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Caller:
    """Asks one service. Opened and closed by `Asker.calling`.

    Args:
        service: Whom.
        client: How, without a deadline of its own.
        has_token: Whether it shows a token.
    """

    def __init__(self, service: Service, client: httpx.AsyncClient, has_token: bool) -> None:
        self.service = service
        self.has_token = has_token
        self._client = client

    async def get(self, path: str) -> Answer:
        """Any answer at all; raises `CtlError` without one."""
        return await self._send("GET", path, None)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a good answer; None where it has no body.

        Raises:
            CtlError: It does not answer, or answers something else.
            RefusedError: It refuses; the text is the service's own where it gives one.
        """
        answer = await self._send(method, path, body)
        if answer.status >= httpx.codes.BAD_REQUEST:
            raise self.refusal(answer)
        return answer.json() if answer.body else None

    def refusal(self, answer: Answer) -> RefusedError:
        """Return the error that an answer tells, with what would help."""
        if answer.status == httpx.codes.UNAUTHORIZED:
            text = f"it refuses the token: give one that it knows, by {HOW_TO_AUTHENTICATE}"
            if not self.has_token:
                text = (
                    "it wants a token: give one by"
                    f" {HOW_TO_AUTHENTICATE}{whose_token(self.service.token_secret)}"
                )
            return RefusedError(answer.status, text)
        try:
            problem = answer.json()
        except CtlError:
            problem = None
        told = problem_text(problem) if isinstance(problem, dict) else ""
        return RefusedError(answer.status, told or f"it answers with {answer.phrase}")

    async def _send(self, method: str, path: str, body: Any) -> Answer:
        extensions = (
            {"sni_hostname": self.service.tls_name} if self.service.tls_name is not None else {}
        )
        data, started = bytearray(), time.perf_counter()
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with self._client.stream(
                method,
                self.service.url + path,
                content=content,
                headers=headers,
                extensions=extensions,
            ) as response:
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        raise CtlError(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as exc:
            if str(exc).startswith("illegal"):  # h11 on bytes that are no HTTP
                raise ForeignError(
                    "something else listens there: it does not speak HTTP; correct the address"
                ) from exc
            raise CtlError(_unreached(self.service, exc)) from exc
        return Answer(
            response.status_code, bytes(data), _clock(response), time.perf_counter() - started
        )


class Asker:
    """Asks any number of services at once.

    Args:
        settings: Token, TLS and time limit.

    Raises:
        UsageError: The token file or a TLS file cannot be read, or does not fit.
    """

    def __init__(self, settings: CtlSettings) -> None:
        self.timeout_s = settings.timeout_s
        self._token = given_token(settings)
        self._tls = tls_context(settings.tls)

    async def each(
        self, services: Iterable[Service], question: Callable[[Caller], Awaitable[T]]
    ) -> list[T | CtlError]:
        """Put a question to each service; what comes back is in their order.

        A service that does not answer in time, or refuses, has the error in its place.
        """
        room = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

        async def one(service: Service) -> T | CtlError:
            async with room:
                try:
                    return await self.one(service, question)
                except CtlError as exc:
                    return exc

        return await asyncio.gather(*(one(service) for service in services))

    async def one(self, service: Service, question: Callable[[Caller], Awaitable[T]]) -> T:
        """Put a question to one service.

        Raises:
            CtlError: It does not answer in time, or refuses.
        """
        if service.problem:
            raise CtlError(service.problem)
        try:
            async with asyncio.timeout(self.timeout_s), self.calling(service) as caller:
                return await question(caller)
        except TimeoutError as exc:
            raise CtlError(
                f"no answer within {self.timeout_s:g} s: it hangs, or the network drops what is"
                " sent to it"
            ) from exc

    @contextlib.asynccontextmanager
    async def calling(self, service: Service) -> AsyncIterator[Caller]:
        """A caller of that service, for as long as the block lasts, which needs a deadline of
        its own: bytes may trickle.
        """
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        token = token_text(self._token or service.token)
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        if service.host is not None:
            headers["host"] = service.host
        verify = self._tls if service.url.startswith("https:") else no_context()
        way = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, uds=service.socket_path)
        async with httpx.AsyncClient(
            headers=headers, timeout=self.timeout_s, transport=way
        ) as client:
            yield Caller(service, client, token is not None)


def given_token(settings: CtlSettings) -> ShownToken:
    """Return the token that the caller was given, or None.

    Raises:
        UsageError: The token file cannot be read or holds no token.
    """
    if settings.token_file is None:
        return settings.token
    try:
        return TokenFile(settings.token_file, "token-file")
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc


def _unreached(service: Service, exc: Exception) -> str:
    if isinstance(exc, httpx.LocalProtocolError):  # its text quotes the header, and so the token
        return "it cannot be asked: the request is not valid HTTP; check the token and the address"
    text = str(exc) or type(exc).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"its certificate is not trusted ({text.partition('failed: ')[2].rstrip(')') or text}):"
            " give its authority by --tls CA"
        )
    if isinstance(exc, httpx.ConnectError):
        return f"cannot connect ({text}): is a {service.kind} listening there?"
    if isinstance(exc, httpx.RemoteProtocolError | httpx.ReadError):
        return (
            f"it ended the connection ({text}): perhaps it wants https://, or a certificate (--tls"
            " CA,CERT,KEY)"
        )
    return f"it cannot be asked: {text}"


def _clock(response: httpx.Response) -> float | None:
    try:
        return parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None
