"""`kubectl scale` of lookup and broker under traffic: real processes, and a relay for the Service.

A pod that is to end leaves the Service, serves its connections for its preStop time, and then gets
SIGTERM. tests/integration/storage/test_scaling.py scales storage servers.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from lmcache_core.lookup import LookupClient
from lmcache_core.p2p import BrokerClient, Peer

from tests.chaos.cluster.link import Link
from tests.fixtures.redis_server import running_redis
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.waiting import opened, until

CHUNKS = [bytes([number]) * 16 for number in range(8)]
NUM_CALLERS = 4
MIN_CALLS = 20
CALL_S = 60.0
Call = Callable[[], Awaitable[object]]


class Service:
    """Pods of one Deployment, and the relay that spreads connections over them."""

    def __init__(self, kind: str, directory: Path, redis_url: str) -> None:
        self._package = f"lmcache_{kind}"
        options = {"PORT": "0", "REDIS_URL": redis_url, "REDIS_TIMEOUT_MS": "5000"}
        self._environ = {f"{self._package.upper()}_{name}": options[name] for name in options}
        self._directory = directory
        self.link = Link(1)
        self.pods: dict[str, ServiceProcess] = {}

    async def add(self, *names: str) -> None:
        """Start pods; each is in the Service once it is ready."""
        await asyncio.gather(*map(self._add, names))

    async def _add(self, name: str) -> None:
        (self._directory / name).mkdir()
        pod = ServiceProcess(self._package, self._directory / name, self._environ)
        self.pods[name] = pod
        await asyncio.to_thread(pod.start)
        async with httpx.AsyncClient(base_url=pod.url, trust_env=False) as plain:

            async def is_ready() -> bool:
                return bool((await plain.get("/readyz")).json()["status"] == "ok")

            await until(is_ready)
        self.link.set_target(name, pod.ports["port"])

    async def end(self, *names: str) -> list[int]:
        """Send SIGTERM; return the exit codes."""
        stops = (asyncio.to_thread(self.pods.pop(name).stop) for name in names)
        return list(await asyncio.gather(*stops))


class Traffic:
    """Callers that make one call after another until one fails."""

    def __init__(self) -> None:
        self._ends = asyncio.Event()
        self.num_calls = 0

    async def repeat(self, call: Call) -> None:
        while not self._ends.is_set():
            await call()
            self.num_calls += 1
            await asyncio.sleep(0)

    async def wait(self) -> None:
        """Wait for some more calls."""
        enough = self.num_calls + MIN_CALLS * NUM_CALLERS
        await until(lambda: self.num_calls >= enough)

    @asynccontextmanager
    async def underway(self, calls: list[Call]) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as callers:
            for call in calls:
                callers.create_task(self.repeat(call))
            yield
            self._ends.set()


async def lookup_calls(url: str, exits: AsyncExitStack) -> list[Call]:
    async def call(client: LookupClient) -> None:
        await client.renew_instance("pod", incarnation=1, kind="sidecar", ttl_ms=60_000)
        assert not (await client.lookup(CHUNKS)).degraded
        assert not (await client.contains(CHUNKS)).degraded

    clients = [LookupClient(url, None, CALL_S) for _ in range(NUM_CALLERS)]
    for client in clients:
        await exits.enter_async_context(opened(client))
    return [lambda client=client: call(client) for client in clients]


async def broker_calls(url: str, exits: AsyncExitStack) -> list[Call]:
    holder = Peer("holder", 1, "lm://10.0.0.1:65433", "sidecar", "z1", "n1")

    async def call(client: BrokerClient, requester: str) -> None:
        await client.register(holder, load=0.0, ttl_ms=60_000)
        (assignment,) = await client.transfers(requester, [(CHUNKS[0], ["holder"])])
        await client.done(requester, [assignment.pull])

    clients = [BrokerClient(url, None, CALL_S) for _ in range(NUM_CALLERS)]
    for client in clients:
        await exits.enter_async_context(opened(client))
    return [lambda client=client, i=i: call(client, f"r{i}") for i, client in enumerate(clients)]


@pytest.mark.parametrize(("kind", "calls_of"), [("lookup", lookup_calls), ("broker", broker_calls)])
async def test_no_call_fails_while_a_service_is_scaled(
    kind: str,
    calls_of: Callable[[str, AsyncExitStack], Awaitable[list[Call]]],
    tmp_path: Path,
) -> None:
    with running_redis() as redis_server:
        service, traffic = Service(kind, tmp_path, redis_server.url), Traffic()
        await service.link.open()
        try:
            await service.add("a")
            async with AsyncExitStack() as exits:
                calls = await calls_of(f"http://127.0.0.1:{service.link.port}", exits)
                async with traffic.underway(calls):
                    await traffic.wait()
                    await service.add("b", "c")
                    await traffic.wait()
                    for name in ("a", "b"):
                        service.link.set_target(name, None)
                    await traffic.wait()  # The preStop time.
                    assert await service.end("a", "b") == [0, 0]
                    await traffic.wait()
        finally:
            await service.link.close()
            for pod in service.pods.values():
                pod.stop(signal.SIGKILL)
