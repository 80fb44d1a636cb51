"""`kubectl scale` while requests run, with real processes: what a Service in front of the pods does
is done by a relay.

A pod that is to end first leaves the Service (no new connection gets there), goes on for its
preStop time with the connections that it has, and then gets SIGTERM. Storage servers, which clients
know one by one, are scaled in tests/integration/storage/test_scaling.py.
"""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from lmcache_core.lookup import LookupClient
from lmcache_core.p2p import BrokerClient, Peer

from tests.chaos.cluster.link import Link
from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.service_process import ServiceProcess

CHUNKS = [bytes([number]) * 16 for number in range(8)]
NUM_CALLERS = 4
PAUSE_S = 0.002
PRE_STOP_S = 0.3
CALL_S = 30.0
MIN_CALLS = 20
Call = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@dataclass
class Replicas:
    """Pods of one Deployment behind their Service."""

    package: str
    environ: dict[str, str]
    directory: Path
    link: Link = field(default_factory=lambda: Link(1))
    pods: dict[str, ServiceProcess] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.link.port}"

    async def add(self, *names: str) -> None:
        """`kubectl scale` up: it is in the Service when it is ready."""
        await asyncio.gather(*map(self._add, names))

    async def _add(self, name: str) -> None:
        (self.directory / name).mkdir()
        pod = self.pods[name] = ServiceProcess(self.package, self.directory / name, self.environ)
        await asyncio.to_thread(pod.start)
        await _until_ready(pod)
        self.link.set_target(name, pod.ports["port"])

    async def remove(self, *names: str) -> list[int]:
        """`kubectl scale` down; the exit codes."""
        for name in names:
            self.link.set_target(name, None)
        await asyncio.sleep(PRE_STOP_S)
        return list(
            await asyncio.gather(*(asyncio.to_thread(self.pods.pop(name).stop) for name in names))
        )


@asynccontextmanager
async def behind_a_service(
    kind: str, directory: Path, redis: RedisServer
) -> AsyncIterator[Replicas]:
    with redis.client() as client:
        client.flushall()
    keys = directory / "ticket-keys"
    keys.write_text(f"k1:{base64.b64encode(b'k' * 32).decode()}\n")
    options = {"PORT": "0", "REDIS_URL": redis.url, "REDIS_TIMEOUT_MS": "5000"} | (
        {"TICKET_KEYS_FILE": str(keys)} if kind == "broker" else {}
    )
    made = Replicas(
        f"lmcache_{kind}",
        {f"LMCACHE_{kind.upper()}_{name}": value for name, value in options.items()},
        directory,
    )
    await made.link.open()
    try:
        yield made
    finally:
        await made.link.close()
        for pod in made.pods.values():
            pod.stop(signal.SIGKILL)


async def _until_ready(pod: ServiceProcess) -> None:
    async with (
        asyncio.timeout(CALL_S),
        httpx.AsyncClient(base_url=pod.url, trust_env=False) as plain,
    ):
        while (await plain.get("/readyz")).json()["status"] != "ok":
            await asyncio.sleep(0.02)


class Traffic:
    """Callers that call one behind the other, and what they were not answered."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._ends = asyncio.Event()
        self.num_calls = 0
        self.failures: list[Exception] = []

    async def _run(self, call: Call) -> None:
        while not self._ends.is_set():
            try:
                await call()
            except Exception as exc:
                self.failures.append(exc)
                raise
            self.num_calls += 1
            await asyncio.sleep(PAUSE_S)

    async def go_on(self) -> None:
        """Until each has called a few times more."""
        enough = self.num_calls + MIN_CALLS * len(self._calls)
        async with asyncio.timeout(CALL_S):
            while self.num_calls < enough and not self.failures:
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def underway(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as callers:
            for call in self._calls:
                callers.create_task(self._run(call))
            yield
            self._ends.set()


async def scale_up_and_down(replicas: Replicas, calls: list[Call]) -> Traffic:
    """One, three, and one of the new ones."""
    traffic = Traffic(calls)
    async with traffic.underway():
        await traffic.go_on()
        await replicas.add("b", "c")
        await traffic.go_on()
        assert await replicas.remove("a", "b") == [0, 0]
        await traffic.go_on()
    return traffic


async def test_lookups_and_reports_go_on(tmp_path: Path, redis_server: RedisServer) -> None:
    async with behind_a_service("lookup", tmp_path, redis_server) as replicas:
        await replicas.add("a")
        clients = [LookupClient(replicas.url, None, CALL_S) for _ in range(NUM_CALLERS)]
        for client in clients:
            await client.open()

        async def renew() -> None:
            await clients[0].renew_instance("pod", incarnation=1, kind="sidecar", ttl_ms=60_000)

        def ask(client: LookupClient) -> Call:
            async def call() -> None:
                assert not (await client.lookup(CHUNKS)).degraded
                assert not (await client.contains(CHUNKS)).degraded

            return call

        try:
            traffic = await scale_up_and_down(replicas, [renew, *map(ask, clients)])
        finally:
            for client in clients:
                await client.close()
    assert not traffic.failures
    assert traffic.num_calls >= 3 * MIN_CALLS * NUM_CALLERS


async def test_transfers_and_heartbeats_go_on(tmp_path: Path, redis_server: RedisServer) -> None:
    async with behind_a_service("broker", tmp_path, redis_server) as replicas:
        await replicas.add("a")
        clients = [BrokerClient(replicas.url, None, CALL_S) for _ in range(NUM_CALLERS)]
        for client in clients:
            await client.open()

        async def beat() -> None:
            peer = Peer("holder", 1, "lm://10.0.0.1:65433", "sidecar", "z1", "n1")
            await clients[0].register(peer, load=0.0, ttl_ms=60_000, draining=False)

        def pull(client: BrokerClient, requester: str) -> Call:
            async def call() -> None:
                (assignment,) = await client.transfers(requester, [(CHUNKS[0], ["holder"])])
                await client.done(requester, [assignment.pull])

            return call

        try:
            await beat()
            traffic = await scale_up_and_down(
                replicas, [beat, *(pull(client, f"r{i}") for i, client in enumerate(clients))]
            )
        finally:
            for client in clients:
                await client.close()
    assert not traffic.failures
    assert traffic.num_calls >= 3 * MIN_CALLS * NUM_CALLERS
