"""Make concurrent calls to a service; measure the calls and the network."""

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
from lmcache_ctl.bench.report import CONNECT, ROUND_TRIP, BenchLoad, Latency, Phase
from lmcache_ctl.errors import CtlError
from lmcache_ctl.output import Tell
from lmcache_ctl.services import Endpoint
from lmcache_ctl.settings import CtlSettings

CALL_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 0.1
"""After a call that failed."""
TELL_S: Final = 0.2
"""Between two updates of the progress."""
MAX_PROBES: Final = 200
"""Connections, and round trips, that measure the network by itself."""
PROBE_TIMEOUT_S: Final = 5.0
MAX_WAY_S: Final = 1.0
WAY_SHARE: Final = 0.1
"""Of the time that a bench is given, for each of the two, on top of it."""
DEFAULT_PORTS: Final = {"http": 80, "https": 443, "lm": 65432, "lm+tls": 65432}


@dataclass
class Done:
    """The outcome of a call: chunks that are right and their payload; the others by reason."""

    seconds: float = 0.0
    num_chunks: int = 0
    num_bytes: int = 0
    not_done: Counter[str] = field(default_factory=Counter)


Call = Callable[[], Awaitable[Done | None]]
"""One call to the target; None: there is nothing more to do."""


async def run_phase(name: str, call: Call, concurrency: int, seconds: float, tell: Tell) -> Phase:
    """Make concurrent calls until there are no more or the time is over; measure them.

    Args:
        name: Name of the phase.
        call: Makes one call; a `CtlError` that it raises ends the phase.
        concurrency: Number of concurrent calls.
        seconds: Longest duration of the phase.
        tell: Called repeatedly with the progress.
    """
    latencies: list[float] = []
    total, failed = Done(), Counter[str]()
    started = time.perf_counter()

    async def work() -> None:
        while time.perf_counter() < started + seconds:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    done = await call()
            except (LMCacheError, TimeoutError) as exc:
                failed[str(exc) or "no answer in time"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            if done is None:
                return
            latencies.append(done.seconds)
            total.num_chunks += done.num_chunks
            total.num_bytes += done.num_bytes
            total.not_done.update(done.not_done)

    async def show_progress() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            share = min(1.0, (time.perf_counter() - started) / seconds)
            tell(name, share, 1.0, f"{len(latencies)} calls", "")

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    showing = asyncio.create_task(show_progress())
    try:
        await asyncio.gather(*workers)
    finally:
        for task in (*workers, showing):
            task.cancel()
        await asyncio.gather(*workers, showing, return_exceptions=True)
    took_s, num_calls = time.perf_counter() - started, len(latencies)
    tell(name, 1.0, 1.0, f"{num_calls} calls", f"{name}: {num_calls} calls")
    return Phase(
        name,
        num_calls,
        total.num_chunks,
        total.num_bytes,
        round(took_s, 3),
        round(num_calls / took_s, 1),
        round(total.num_bytes / took_s),
        _latency(latencies),
        dict(total.not_done),
        dict(failed),
    )


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    at = [ordered[min(last, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99, 1.0)]
    return Latency(*(round(1000 * value, 3) for value in at))


class ServiceTransport(httpx.AsyncBaseTransport):
    """HTTP to one service: its socket, the name of its certificate, and its host name.

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
        """Send a request to the service, not to the host of its URL."""
        if self._service.tls_name is not None:
            request.extensions = {**request.extensions, "sni_hostname": self._service.tls_name}
        if self._service.host is not None:
            request.headers["host"] = self._service.host
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


def probing(service: Endpoint, probe: Callable[[], Awaitable[float]]) -> Call:
    """Return a call that makes one probe, at most `MAX_PROBES` times. A probe returns its
    seconds.
    """
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

    Return None where that would measure something else: through a port-forward, which the API
    answers, and with several servers in the URL.
    """
    parts = urlsplit(service.url)
    if service.pod or "," in parts.netloc or not parts.hostname:
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
    """Yield a call of `/healthz` over one connection: the share of the network and HTTP in each
    call.
    """
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
    """Measure the network alone: new connections, where possible, then the smallest calls."""
    seconds = min(MAX_WAY_S, load.seconds * WAY_SHARE)
    connect = connecting(service)
    phases = [] if connect is None else [await run_phase(CONNECT, connect, 1, seconds, tell)]
    return [*phases, await run_phase(ROUND_TRIP, smallest, 1, seconds, tell)]
