"""Two broker processes over one Redis act as one broker; without Redis each acts alone."""

from __future__ import annotations

import base64
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import BrokerClient, Peer
from lmcache_core.security import TicketVerifier

from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.waiting import opened, until

CHUNKS = [bytes([i]) * 16 for i in range(8)]
TICKET_KEYS = {"k1": b"k" * 32}
LEASE_MS = 60_000
HOT_PULLS = 3


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@contextmanager
def two_brokers(directory: Path, redis_server: RedisServer) -> Iterator[list[ServiceProcess]]:
    keys = directory / "ticket-keys"
    keys.write_text(f"k1:{base64.b64encode(TICKET_KEYS['k1']).decode()}\n")
    environ = {
        "LMCACHE_BROKER_PORT": "0",
        "LMCACHE_BROKER_REDIS_URL": redis_server.url,
        # On a busy machine an answer may take longer than the default of 0.2 s.
        "LMCACHE_BROKER_REDIS_TIMEOUT_MS": "3000",
        "LMCACHE_BROKER_TICKET_KEYS_FILE": str(keys),
        "LMCACHE_BROKER_TICKET_TTL_MS": "60000",
        "LMCACHE_BROKER_HOT_CHUNK_PULLS": str(HOT_PULLS),
    }
    found = []
    for name in ("one", "two"):
        (directory / name).mkdir()
        found.append(ServiceProcess("lmcache_broker", directory / name, environ))
        found[-1].start()
    try:
        yield found
    finally:
        for process in found:
            process.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def shared_processes(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[list[ServiceProcess]]:
    with two_brokers(tmp_path_factory.mktemp("brokers"), redis_server) as processes:
        yield processes


@pytest.fixture
def own_processes(tmp_path: Path, redis_server: RedisServer) -> Iterator[list[ServiceProcess]]:
    """For tests that kill them."""
    with two_brokers(tmp_path, redis_server) as processes:
        yield processes


@asynccontextmanager
async def clients_of(
    processes: list[ServiceProcess], redis_server: RedisServer
) -> AsyncIterator[list[BrokerClient]]:
    with redis_server.client() as plain:
        plain.flushall()
    for process in processes:
        await until(lambda process=process: is_shared(process))
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(opened(BrokerClient(process.url, None, 30.0)))
            for process in processes
        ]


async def is_shared(process: ServiceProcess) -> bool:
    async with httpx.AsyncClient(base_url=process.url, trust_env=False, timeout=30) as rest:
        return bool((await rest.get("/readyz")).json()["status"] == "ok")


@pytest.fixture
async def brokers(
    shared_processes: list[ServiceProcess], redis_server: RedisServer
) -> AsyncIterator[list[BrokerClient]]:
    async with clients_of(shared_processes, redis_server) as clients:
        yield clients


def peer(name: str, incarnation: int = 1) -> Peer:
    return Peer(name, incarnation, f"lm://{name}.example:65433", "sidecar", "z1", "n1")


async def register(broker: BrokerClient, *names: str) -> None:
    for name in names:
        await broker.register(peer(name), load=0.0, ttl_ms=LEASE_MS)


async def holds(broker: BrokerClient, expected: list[str]) -> bool:
    return [found.id for found in await broker.peers()] == expected


async def test_registrations_at_one_broker_are_known_at_the_other(
    brokers: list[BrokerClient],
) -> None:
    one, two = brokers
    await register(one, "a")
    await register(two, "b")
    for broker in brokers:
        await until(lambda broker=broker: holds(broker, ["a", "b"]))
    (assignment,) = await two.transfers("b", [(CHUNKS[0], ["a"])])
    assert TicketVerifier(TICKET_KEYS, "a").verify(assignment.ticket).requester == "b"
    with pytest.raises(UnavailableError, match="status 409"):
        await one.register(peer("b", incarnation=0), load=0.0, ttl_ms=LEASE_MS)
    assert assignment.distributed_url == "lm://a.example:65433"
    await one.drain("b")
    assert (await two.register(peer("b"), load=0.1, ttl_ms=LEASE_MS)).draining
    await two.deregister("a")
    await until(lambda: holds(one, ["b"]))


async def test_an_order_to_copy_a_hot_chunk_reaches_its_holder_through_either_broker(
    brokers: list[BrokerClient], redis_server: RedisServer
) -> None:
    one, two = brokers
    await register(two, "hot-a", "hot-b")
    await until(lambda: holds(one, ["hot-a", "hot-b"]))
    for i in range(HOT_PULLS):
        (pull,) = await one.transfers(f"r{i}", [(CHUNKS[4], ["hot-a"])])
        await one.done(f"r{i}", [pull.pull])
    (order,) = (await two.register(peer("hot-a"), load=0.0, ttl_ms=LEASE_MS)).copies
    assert (order.chunk_id, order.instance) == (CHUNKS[4].hex(), "hot-b")
    for broker in brokers:
        lease = await broker.register(peer("hot-a"), load=0.0, ttl_ms=LEASE_MS)
        assert lease.copies == (), "it is sent once"
    redis_server.pause()
    try:
        for i in range(HOT_PULLS):
            assert await one.transfers(f"r{i}", [(CHUNKS[5], ["hot-a"])])
        (order,) = (await one.register(peer("hot-a"), load=0.0, ttl_ms=LEASE_MS)).copies
        assert order.chunk_id == CHUNKS[5].hex(), "without Redis, by the broker that knows of it"
    finally:
        redis_server.resume()


@pytest.mark.parametrize("failure", ["pause", "kill"])
async def test_without_redis_each_broker_answers_from_its_memory(
    shared_processes: list[ServiceProcess],
    brokers: list[BrokerClient],
    redis_server: RedisServer,
    failure: str,
) -> None:
    one, two = brokers
    await register(one, "a")
    await until(lambda: holds(two, ["a"]))
    getattr(redis_server, failure)()
    try:
        await one.peers()
        assert await holds(two, ["a"])
        assert await two.transfers("r", [(CHUNKS[0], ["a"])])
        await register(one, "b")
        assert "b" in [found.id for found in await one.peers()]
        with pytest.raises(UnavailableError, match="status 503"):
            await one.drain("a")  # The order could miss its peer.
        async with httpx.AsyncClient(base_url=shared_processes[1].url, timeout=30) as rest:
            readiness = await rest.get("/readyz")
            assert (readiness.status_code, readiness.json()["status"]) == (200, "degraded")
            where = f"redis at 127.0.0.1:{redis_server.port}"
            assert where in readiness.json()["checks"]["redis"]["detail"]
            assert "lmcache_broker_is_shared 0.0" in (await rest.get("/metrics")).text
    finally:
        if failure == "pause":
            redis_server.resume()
        else:
            redis_server.start()

    async def is_known_again() -> bool:
        """Heartbeats bring back what Redis has lost or missed."""
        await register(one, "a", "b")
        return await holds(two, ["a", "b"])

    await until(is_known_again)
    await until(lambda: holds(one, ["a", "b"]))


async def test_a_pull_outlives_a_flush_where_it_was_granted(
    brokers: list[BrokerClient], redis_server: RedisServer
) -> None:
    one, two = brokers
    await register(one, "a")
    (pull,) = await one.transfers("r", [(CHUNKS[0], ["a"])])
    with redis_server.client() as client:
        client.flushall()
    await until(lambda: holds(two, []))
    await register(one, "a")
    assert await one.renew("r", pull.pull)
    await until(lambda: holds(two, ["a"]))


async def test_a_restarted_broker_knows_what_the_other_knew(
    own_processes: list[ServiceProcess], redis_server: RedisServer
) -> None:
    async with clients_of(own_processes, redis_server) as (one, _):
        await register(one, "a")
        await one.drain("a")
    for process in own_processes:
        process.stop(signal.SIGKILL)
    own_processes[1].start()
    async with opened(BrokerClient(own_processes[1].url, None, 30.0)) as fresh:
        await until(lambda: holds(fresh, ["a"]))
        assert [found.draining for found in await fresh.peers()] == [True]
