"""Ask services over REST: many at once, each with one deadline for all its questions.

`httpx` and the core's TLS are imported where a request is made, which keeps `--help` fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
from lmcache_core.errors import ConfigError

from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.services import HOW_TO_AUTHENTICATE, Endpoint

if TYPE_CHECKING:
    import httpx

MAX_ASKED_AT_ONCE: Final = 64
MAX_ANSWER_BYTES: Final = 64 << 20
MAX_ERRORS_TOLD: Final = 4
MAX_TLS_FILES: Final = 3

T = TypeVar("T")


class HttpAnswer(NamedTuple):
    """The answer of a service.

    Attributes:
        clock_s: The service's own time, Unix time in whole seconds; None where it does not say.
        seconds: How long the answer took.
    """

    status: int
    body: bytes
    clock_s: float | None
    seconds: float

    def json(self) -> Any:
        """Decode the body.

        Raises:
            ForeignError: The body is not JSON.
        """
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise foreign("its answer is not JSON") from exc


class ForeignError(CtlError):
    """The answer does not come from a service of this cache."""


def foreign(what: str) -> ForeignError:
    """Return the error that says how something else than a service of this cache answers."""
    return ForeignError(f"something else listens there: {what}; correct the address")


class ServiceRefusedError(CtlError):
    """A service answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Caller:
    """Ask one service. Opened and closed by `Asker.calling`.

    Args:
        client: Sends the requests; sets no deadline.
    """

    def __init__(self, service: Endpoint, client: httpx.AsyncClient) -> None:
        self.service = service
        self._client = client

    async def get(self, path: str) -> HttpAnswer:
        """Return the answer, whatever its status. Raise `CtlError` if there is none."""
        return await self._send("GET", path, None)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of a successful answer; None if it has no body.

        Raises:
            CtlError: The service does not answer, or its answer is not JSON.
            ServiceRefusedError: The service refuses; the text is the service's own if it gives one.
        """
        answer = await self._send(method, path, body)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise self.refusal(answer)
        return answer.json() if answer.body else None

    def refusal(self, answer: HttpAnswer) -> ServiceRefusedError:
        """Return the error that an answer reports, with advice."""
        if answer.status == HTTPStatus.UNAUTHORIZED:
            where = self.service.token_hint
            return ServiceRefusedError(
                answer.status,
                f"it refuses the token: give one that it knows with {HOW_TO_AUTHENTICATE}{where}"
                if self.service.token
                else f"it requires a token: give one with {HOW_TO_AUTHENTICATE}{where}",
            )
        import httpx

        try:
            problem = answer.json()
        except CtlError:
            problem = None
        told = _problem_text(problem) if isinstance(problem, dict) else ""
        phrase = httpx.codes.get_reason_phrase(answer.status) or "an unknown status"
        return ServiceRefusedError(answer.status, told or f"it answers with {phrase!r}")

    async def _send(self, method: str, path: str, body: Any) -> HttpAnswer:
        import httpx

        name = self.service.tls_name
        data, started = bytearray(), time.perf_counter()
        request = self._client.stream(
            method,
            self.service.url + path,
            content=None if body is None else msgspec.json.encode(body),
            headers={} if body is None else {"content-type": "application/json"},
            extensions={} if name is None else {"sni_hostname": name},
        )
        try:
            async with request as response:
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        raise CtlError(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as exc:
            if str(exc).startswith("illegal"):  # h11 on bytes that are no HTTP
                raise foreign("it does not speak HTTP") from exc
            raise CtlError(_unreached(self.service, exc) + self.service.origin) from exc
        try:
            clock_s = parsedate_to_datetime(response.headers["date"]).timestamp()
        except (KeyError, ValueError, TypeError):
            clock_s = None
        return HttpAnswer(response.status_code, bytes(data), clock_s, time.perf_counter() - started)


class Asker:
    """Ask any number of services at once.

    Raises:
        UsageError: A TLS file cannot be read, or does not fit.
    """

    def __init__(self, settings: CtlSettings) -> None:
        self.timeout_s = settings.timeout_s
        self._tls = tls_context(settings.tls)

    async def each(
        self, services: Iterable[Endpoint], question: Callable[[Caller], Awaitable[T]]
    ) -> list[T | CtlError]:
        """Put a question to each service; return the answers in their order.

        A service that does not answer in time, or refuses, has the error in its place.
        """
        room = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

        async def one(service: Endpoint) -> T | CtlError:
            async with room:
                try:
                    return await self.one(service, question)
                except CtlError as exc:
                    return exc

        return await asyncio.gather(*(one(service) for service in services))

    async def one(self, service: Endpoint, question: Callable[[Caller], Awaitable[T]]) -> T:
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
                f"no answer within {self.timeout_s:g} s: it hangs, or the network drops its packets"
                + service.origin
            ) from exc

    @contextlib.asynccontextmanager
    async def calling(self, service: Endpoint) -> AsyncIterator[Caller]:
        """Yield a caller of that service; set a deadline around it, since bytes may trickle."""
        import httpx
        from lmcache_core.security import no_context

        headers = {"accept": "application/json", "accept-encoding": "identity"}
        if service.token is not None:
            headers["authorization"] = f"Bearer {service.token}"
        if service.host is not None:
            headers["host"] = service.host
        verify = self._tls if service.url.startswith("https:") else no_context()
        way = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, uds=service.socket_path)
        async with httpx.AsyncClient(
            headers=headers, timeout=self.timeout_s, transport=way
        ) as client:
            yield Caller(service, client)


def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently on a new event loop; return their results in order."""

    async def all_of_it() -> list[T]:
        return await asyncio.gather(*work)

    return asyncio.run(all_of_it())


def tls_context(tls: str | None) -> ssl.SSLContext:
    """Return the TLS context that `CA[,CERT[,KEY]]` names.

    Args:
        tls: PEM files: the authorities to trust, and the certificate to show. None: this machine's
            authorities.

    Raises:
        UsageError: There are more than three names, a file cannot be read, or the files do not
            match.
    """
    from lmcache_core.security import TlsFiles, client_context

    if tls is None:
        return client_context()
    names = tls.split(",")
    if len(names) > MAX_TLS_FILES:
        raise UsageError(f"tls={tls!r} names {len(names)} files: write CA[,CERT[,KEY]]")
    ca, cert, key = (*(Path(name) if name else None for name in names), None, None)[:MAX_TLS_FILES]
    if cert is None and key is not None:
        raise UsageError(f"tls={tls!r} names a key and no certificate: write CA,CERT,KEY")
    try:
        return client_context(TlsFiles(cert, key, ca))
    except ConfigError as exc:
        raise UsageError(f"tls={tls!r}: {exc}") from exc


def _problem_text(problem: dict[str, Any]) -> str:
    """Return the text of a problem (RFC 9457); for an invalid question, what is wrong and where."""
    errors = problem.get("errors")
    wrong = [
        f"{one.get('at')}: {one.get('message')}"
        for one in (errors if isinstance(errors, list) else ())
        if isinstance(one, dict)
    ]
    title = problem.get("detail") or problem.get("title") or ""
    return "; ".join(wrong[:MAX_ERRORS_TOLD]) or str(title)


def _unreached(service: Endpoint, exc: Exception) -> str:
    import httpx

    if isinstance(exc, httpx.LocalProtocolError):  # its text quotes the header, and so the token
        return "it cannot be asked: the request is not valid HTTP; check the token and the address"
    text = str(exc) or type(exc).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.partition("failed: ")[2].rstrip(")") or text
        return f"its certificate is not trusted ({why}): give its authority with --tls CA"
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
        return f"it answers without TLS ({text}): write http:// in its address"
    if isinstance(exc, httpx.ConnectError):
        return f"cannot connect ({text}): no {service.kind} seems to listen there"
    if isinstance(exc, httpx.RemoteProtocolError | httpx.ReadError):
        return (
            f"it ended the connection ({text}): perhaps it wants https://, or a certificate (--tls"
            " CA,CERT,KEY)"
        )
    return f"it cannot be asked: {text}"
