"""Make calls to a service, several at once, and measure them and the way there."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import httpx
from lmcache_core.errors import LMCacheError
from lmcache_core.security import no_context

from lmcache_ctl.asking import tls_context
from lmcache_ctl.bench.report import (
    CONNECT,
    ROUND_TRIP,
    BenchLoad,
    Latency,
    Phase,
    PhaseProgress,
    Tell,
)
from lmcache_ctl.errors import CtlError
from lmcache_ctl.services import Endpoint
from lmcache_ctl.settings import CtlSettings

CALL_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 0.1
"""After a call that failed."""
TELL_S: Final = 0.2
"""Between two words on how far it is."""
MAX_PROBES: Final = 200
"""Connections, and round trips, that are made to learn what the way there takes by itself."""
PROBE_TIMEOUT_S: Final = 5.0
MAX_WAY_S: Final = 1.0
WAY_SHARE: Final = 0.1
"""Of the time that a bench is given, for each of the two, on top of it."""
DEFAULT_PORTS: Final = {"http": 80, "https": 443, "lm": 65432, "lm+tls": 65432}


@dataclass
class Done:
    """What a call came to: payload bytes of each chunk that is right, reasons of the others."""

    seconds: float = 0.0
    num_chunks: int = 0
    num_bytes: int = 0
    not_done: Counter[str] = field(default_factory=Counter)


Call = Callable[[], Awaitable[Done | None]]
"""One call to the target; None: there is nothing more to do."""


class PhaseRun:
    """Makes calls, several at once, until there are no more or the time is over.

    Args:
        name: Of the phase.
        concurrency: How many at once.
        seconds: How long at most.
        tell: Called again and again with how far it is.
    """

    def __init__(self, name: str, concurrency: int, seconds: float, tell: Tell) -> None:
        self._name = name
        self._concurrency = concurrency
        self._seconds = seconds
        self._tell = tell
        self._latencies: list[float] = []
        self._sum = Done()
        self._failed: Counter[str] = Counter()

    async def run(self, call: Call) -> Phase:
        """Make the calls, and measure them; errors of `CtlError` that a call raises end it."""
        started = time.perf_counter()
        ends = started + self._seconds
        telling = asyncio.create_task(self._telling(started))
        try:
            await self._all(call, ends)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        seconds = time.perf_counter() - started
        self._tell(PhaseProgress(self._name, 1.0, len(self._latencies), is_over=True))
        done = self._sum
        return Phase(
            self._name,
            len(self._latencies),
            done.num_chunks,
            done.num_bytes,
            round(seconds, 3),
            round(len(self._latencies) / seconds, 1),
            round(done.num_bytes / seconds),
            _latency(self._latencies),
            dict(done.not_done),
            dict(self._failed),
        )

    async def _all(self, call: Call, ends: float) -> None:
        workers = [asyncio.create_task(self._work(call, ends)) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _telling(self, started: float) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            share = min(1.0, (time.perf_counter() - started) / self._seconds)
            self._tell(PhaseProgress(self._name, share, len(self._latencies), is_over=False))

    async def _work(self, call: Call, ends: float) -> None:
        while time.perf_counter() < ends:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    done = await call()
            except (LMCacheError, TimeoutError) as exc:
                self._failed[str(exc) or "no answer in time"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            if done is None:
                return
            self._latencies.append(done.seconds)
            self._sum.num_chunks += done.num_chunks
            self._sum.num_bytes += done.num_bytes
            self._sum.not_done.update(done.not_done)


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    shares = (0.5, 0.9, 0.99)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]
    return Latency(*(round(1000 * value, 3) for value in (*at, ordered[-1])))


class ServiceTransport(httpx.AsyncBaseTransport):
    """HTTP to one service, by its socket, its certificate's name and the host it is called by.

    Args:
        service: Which one.
        settings: Whom to trust.
        max_connections: Calls at once; more wait.
    """

    def __init__(self, service: Endpoint, settings: CtlSettings, max_connections: int) -> None:
        self._service = service
        verify = tls_context(settings.tls) if service.url.startswith("https:") else no_context()
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        )
        self._transport = httpx.AsyncHTTPTransport(
            verify=verify, trust_env=False, limits=limits, uds=service.socket_path
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the service, whatever its URL says."""
        if self._service.tls_name is not None:
            request.extensions = {**request.extensions, "sni_hostname": self._service.tls_name}
        if self._service.host is not None:
            request.headers["host"] = self._service.host
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """End the connections."""
        await self._transport.aclose()


def probing(service: Endpoint, probe: Callable[[], Awaitable[float]]) -> Call:
    """Return a call that makes one probe, which tells its seconds, `MAX_PROBES` times at most."""
    rest = iter(range(MAX_PROBES))

    async def call() -> Done | None:
        if next(rest, None) is None:
            return None
        try:
            return Done(await probe())
        except (OSError, httpx.HTTPError) as exc:
            silence = "no answer in time" if isinstance(exc, OSError) else type(exc).__name__
            raise CtlError(f"{service.url} cannot be used: {str(exc) or silence}") from exc

    return call


def connecting(service: Endpoint) -> Call | None:
    """Return a call that opens a connection, one round trip that the other side's kernel answers.

    None where none leads there: behind a port-forward, where the API answers, and where a URL
    names several servers.
    """
    parts = urlsplit(service.url)
    if service.forwarded or "," in parts.netloc or not parts.hostname:
        return None
    host, port = parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]

    async def connect() -> float:
        started = time.perf_counter()
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
        seconds = time.perf_counter() - started
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        return seconds

    return probing(service, connect)


@asynccontextmanager
async def asking_for_nothing(service: Endpoint, settings: CtlSettings) -> AsyncIterator[Call]:
    """Yield a call of `/healthz` over one connection: what the way and HTTP take of each call."""
    transport = ServiceTransport(service, settings, 1)
    async with httpx.AsyncClient(transport=transport, timeout=PROBE_TIMEOUT_S) as client:

        async def ask() -> float:
            started = time.perf_counter()
            await client.get(f"{service.url}/healthz")
            return time.perf_counter() - started

        call = probing(service, ask)
        await call()  # not measured: it also loads httpx' backend and opens the connection
        yield call


async def way_phases(service: Endpoint, smallest: Call, load: BenchLoad, tell: Tell) -> list[Phase]:
    """Measure the way there by itself: connections where one leads there, then smallest calls."""
    seconds = min(MAX_WAY_S, load.seconds * WAY_SHARE)
    connect = connecting(service)
    phases = [] if connect is None else [await PhaseRun(CONNECT, 1, seconds, tell).run(connect)]
    return [*phases, await PhaseRun(ROUND_TRIP, 1, seconds, tell).run(smallest)]
