"""How a bench gets to the server that it measures: by its address, or through whatever way its
service was found by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import httpx
from lmcache_core.security import no_context

from lmcache_ctl.bench.phases import Call, Done, PhaseRun, Tell
from lmcache_ctl.bench.report import CONNECT, ROUND_TRIP, Load, Phase
from lmcache_ctl.cluster.services import Service
from lmcache_ctl.errors import CtlError
from lmcache_ctl.rest import tls_context
from lmcache_ctl.settings import CtlSettings

MAX_PROBES: Final = 200
"""Connections, and round trips, that are made to learn what the way there takes by itself."""
PROBE_TIMEOUT_S: Final = 5.0
MAX_WAY_S: Final = 1.0
WAY_SHARE: Final = 0.1
"""Of the time that a bench is given, for each of the two, on top of it."""
DEFAULT_PORTS: Final = {"http": 80, "https": 443, "lm": 65432, "lm+tls": 65432}


class Way(httpx.AsyncBaseTransport):
    """HTTP to one service, as it is reached: its socket, the name that its certificate has, the
    host that it is called by.

    Args:
        service: Which one.
        settings: Whom to trust.
        max_connections: Calls at once; more wait.
    """

    def __init__(self, service: Service, settings: CtlSettings, max_connections: int) -> None:
        self._service = service
        verify = tls_context(settings.tls) if service.url.startswith("https:") else no_context()
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        )
        self._transport = httpx.AsyncHTTPTransport(
            verify=verify, trust_env=False, limits=limits, uds=service.socket_path
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        if self._service.tls_name is not None:
            request.extensions = {**request.extensions, "sni_hostname": self._service.tls_name}
        if self._service.host is not None:
            request.headers["host"] = self._service.host
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """End the connections."""
        await self._transport.aclose()


def way_to(service: Service, settings: CtlSettings, max_connections: int) -> Way | None:
    """The way to a service that its URL alone does not lead to; None where it does."""
    if service.socket_path is None and service.tls_name is None and service.host is None:
        return None
    return Way(service, settings, max_connections)


def connecting(service: Service) -> Call | None:
    """A call that opens a connection and ends it: one round trip which the kernel of the other side
    answers; None where none leads there.

    That is so behind a port-forward, where the API answers, and where a URL names several servers.
    """
    parts = urlsplit(service.url)
    if service.forwarded or "," in parts.netloc or not parts.hostname:
        return None
    host, port = parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]
    rest = iter(range(MAX_PROBES))

    async def call() -> Done | None:
        if next(rest, None) is None:
            return None
        done, started = Done(), time.perf_counter()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as exc:
            raise CtlError(f"{service.url} cannot be used: {exc or 'no answer in time'}") from exc
        done.seconds = time.perf_counter() - started
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        return done

    return call


@asynccontextmanager
async def asking_for_nothing(service: Service, settings: CtlSettings) -> AsyncIterator[Call]:
    """A call of `/healthz` over one connection: what the way there, and HTTP, take of each call."""
    async with httpx.AsyncClient(
        transport=Way(service, settings, 1), timeout=PROBE_TIMEOUT_S
    ) as client:
        rest = iter(range(MAX_PROBES))

        async def call() -> Done | None:
            if next(rest, None) is None:
                return None
            done, started = Done(), time.perf_counter()
            try:
                await client.get(f"{service.url}/healthz")
            except httpx.HTTPError as exc:
                raise CtlError(
                    f"{service.url} cannot be used: {exc or type(exc).__name__}"
                ) from exc
            done.seconds = time.perf_counter() - started
            return done

        yield call


async def way_phases(service: Service, smallest: Call, load: Load, tell: Tell) -> list[Phase]:
    """What the way there takes by itself: a connection where one leads there, and the smallest
    call, one after the other.
    """
    seconds = min(MAX_WAY_S, load.seconds * WAY_SHARE)
    connect = connecting(service)
    phases = [] if connect is None else [await PhaseRun(CONNECT, 1, seconds, tell).run(connect)]
    return [*phases, await PhaseRun(ROUND_TRIP, 1, seconds, tell).run(smallest)]
