"""Two broker processes over one Redis are one broker; without it each is one of its own."""

from __future__ import annotations

import asyncio
import base64
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import BrokerClient, Peer, PeerFigures
from lmcache_core.security import TicketVerifier, read_ticket_keys

from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.waiting import opened, until

CHUNKS = [bytes([i]) * 16 for i in range(8)]
LEASE_MS = 20_000
TICKET_S = 5
"""Longer than a busy machine takes for a few calls."""
MAX_PULLS = 4
HOT_PULLS = 3


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def processes(tmp_path: Path, redis_server: RedisServer) -> Iterator[list[ServiceProcess]]:
    with redis_server.client() as client:
        client.flushall()
    keys = tmp_path / "ticket-keys"
    keys.write_text(f"k1:{base64.b64encode(b'k' * 32).decode()}\n")
    environ = {
        "LMCACHE_BROKER_PORT": "0",
        "LMCACHE_BROKER_REDIS_URL": redis_server.url,
        # On a busy machine an answer may take longer than the 0.2 s after which each broker is on
        # its own.
        "LMCACHE_BROKER_REDIS_TIMEOUT_MS": "1000",
        "LMCACHE_BROKER_TICKET_KEYS_FILE": str(keys),
        "LMCACHE_BROKER_MAX_PULLS_PER_PEER": str(MAX_PULLS),
        "LMCACHE_BROKER_TICKET_TTL_MS": str(TICKET_S * 1000),
        "LMCACHE_BROKER_HOT_CHUNK_PULLS": str(HOT_PULLS),
    }
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        found.append(ServiceProcess("lmcache_broker", tmp_path / name, environ))
        found[-1].start()
    yield found
    for process in found:
        process.stop(signal.SIGKILL)


@pytest.fixture
async def brokers(processes: list[ServiceProcess]) -> AsyncIterator[list[BrokerClient]]:
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(opened(BrokerClient(process.url, None, 30.0)))
            for process in processes
        ]


def peer(name: str, incarnation: int = 1) -> Peer:
    return Peer(name, incarnation, f"lm://{name}.example:65433", "sidecar", "z1", "n1")


async def names(broker: BrokerClient) -> list[str]:
    return [found.id for found in await broker.peers()]


async def test_what_one_is_told_the_other_knows(
    brokers: list[BrokerClient], tmp_path: Path
) -> None:
    one, two = brokers
    await one.register(peer("a"), load=0.5, ttl_ms=LEASE_MS)
    await two.register(peer("b"), load=0.1, ttl_ms=LEASE_MS)
    for broker in brokers:
        await until(lambda broker=broker: holds(broker, ["a", "b"]))
    (assignment,) = await two.transfers("b", [(CHUNKS[0], ["a"])])
    assert (
        TicketVerifier(read_ticket_keys(tmp_path / "ticket-keys"), "a")
        .verify(assignment.ticket)
        .requester
        == "b"
    )
    assert assignment.distributed_url == "lm://a.example:65433"
    await one.drain("b")
    assert (await two.register(peer("b"), load=0.1, ttl_ms=LEASE_MS)).draining, (
        "the peer learns of it wherever it comes next"
    )
    await two.deregister("a")
    await until(lambda: holds(one, ["b"]))


async def holds(broker: BrokerClient, expected: list[str]) -> bool:
    return await names(broker) == expected


async def test_an_older_incarnation_is_refused_by_both(brokers: list[BrokerClient]) -> None:
    one, two = brokers
    await one.register(peer("a", 7), load=0.0, ttl_ms=LEASE_MS)
    with pytest.raises(UnavailableError, match="status 409"):
        await two.register(peer("a", 6), load=0.0, ttl_ms=LEASE_MS)
    await two.register(peer("a", 8), load=0.0, ttl_ms=LEASE_MS)
    await until(lambda: has_incarnation(one, 8))


async def has_incarnation(broker: BrokerClient, incarnation: int) -> bool:
    return [found.incarnation for found in await broker.peers()] == [incarnation]


async def test_together_they_keep_the_bound_on_pulls(brokers: list[BrokerClient]) -> None:
    await brokers[0].register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    asked = [brokers[i % 2].transfers(f"r{i}", [(CHUNKS[0], ["a"])]) for i in range(20)]
    granted = [assignments for assignments in await asyncio.gather(*asked) if assignments]
    assert len(granted) == MAX_PULLS
    for broker in brokers:
        assert [found.num_pulls for found in await broker.peers()] == [MAX_PULLS]
    await asyncio.sleep(TICKET_S + 0.1)
    assert await brokers[1].transfers("r", [(CHUNKS[0], ["a"])]), "their tickets have ended"


async def test_whichever_is_told_that_a_pull_is_over_frees_its_place(
    brokers: list[BrokerClient],
) -> None:
    one, two = brokers
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    began = time.monotonic()
    pulls = [
        pull.pull
        for _ in range(MAX_PULLS)
        for pull in await one.transfers("r", [(CHUNKS[0], ["a"])])
    ]
    assert len(pulls) == MAX_PULLS
    await two.done("other", pulls)
    assert await two.transfers("r", [(CHUNKS[0], ["a"])]) == [], "only its requester ends a pull"
    await two.done("r", pulls[:2])
    assert await two.transfers("r", [(CHUNKS[0], ["a"])])
    await asyncio.sleep(0.06)
    assert await one.transfers("r", [(CHUNKS[0], ["a"])]), "the one that granted them knows it, too"
    assert await one.transfers("r", [(CHUNKS[0], ["a"])]) == []
    assert time.monotonic() - began < TICKET_S, "before the tickets end"


async def test_a_holder_learns_of_a_hot_chunk_wherever_it_comes_next(
    brokers: list[BrokerClient], redis_server: RedisServer
) -> None:
    one, two = brokers
    for name in "ab":
        await two.register(peer(name), load=0.0, ttl_ms=LEASE_MS)
    for i in range(HOT_PULLS):
        (pull,) = await one.transfers(f"r{i}", [(CHUNKS[0], ["a"])])
        await one.done(f"r{i}", [pull.pull])
    (order,) = (await two.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)).copies
    assert (order.chunk_id, order.instance, order.distributed_url) == (
        CHUNKS[0].hex(),
        "b",
        "lm://b.example:65433",
    )
    for broker in brokers:
        assert (await broker.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)).copies == (), (
            "it is told once"
        )
    redis_server.pause()
    try:
        for i in range(HOT_PULLS):
            assert await one.transfers(f"r{i}", [(CHUNKS[1], ["a"])])
        (order,) = (await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)).copies
        assert order.chunk_id == CHUNKS[1].hex(), "while the others cannot be told, by who knows it"
    finally:
        redis_server.resume()


async def test_a_restarted_broker_knows_what_the_other_knows(
    processes: list[ServiceProcess], brokers: list[BrokerClient]
) -> None:
    await brokers[0].register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    await brokers[0].drain("a")
    for process in processes:
        process.stop(signal.SIGKILL)
    processes[1].start()
    async with opened(BrokerClient(processes[1].url, None, 30.0)) as fresh:
        await until(lambda: holds(fresh, ["a"]))
        assert [found.draining for found in await fresh.peers()] == [True]


async def test_without_redis_each_answers_from_its_memory_and_says_so(
    processes: list[ServiceProcess], brokers: list[BrokerClient], redis_server: RedisServer
) -> None:
    one, two = brokers
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    await until(lambda: holds(two, ["a"]))
    for blow in ("pause", "kill"):
        getattr(redis_server, blow)()
        try:
            await one.peers()
            began = time.monotonic()
            assert await names(two) == ["a"]
            assert await two.transfers("r", [(CHUNKS[0], ["a"])])
            await one.register(peer("b"), load=0.0, ttl_ms=LEASE_MS)
            assert "b" in await names(one)
            assert time.monotonic() - began < 3.0
            async with httpx.AsyncClient(base_url=processes[1].url) as rest:
                readiness = await rest.get("/readyz")
                assert (readiness.status_code, readiness.json()["status"]) == (200, "degraded")
                assert (
                    f"redis at 127.0.0.1:{redis_server.port}"
                    in readiness.json()["checks"]["redis"]["detail"]
                )
                assert "lmcache_broker_is_shared 0.0" in (await rest.get("/metrics")).text
                assert not (await rest.get("/v1/stats")).json()["is_shared"]
        finally:
            if blow == "pause":
                redis_server.resume()
            else:
                redis_server.start()

        # What was told meanwhile, and what Redis has lost, the next heartbeats bring back.
        async def is_told_again() -> bool:
            for name in "ab":
                await one.register(peer(name), load=0.0, ttl_ms=LEASE_MS)
            return await holds(two, ["a", "b"])

        await until(is_told_again)
        await until(lambda: holds(one, ["a", "b"]))
        await one.deregister("b")
        await until(lambda: holds(two, ["a"]))


async def test_a_flush_is_healed_by_a_heartbeat(
    brokers: list[BrokerClient], redis_server: RedisServer
) -> None:
    one, two = brokers
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    await until(lambda: holds(two, ["a"]))
    with redis_server.client() as client:
        client.flushall()
    await until(lambda: holds(two, []))
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    for broker in brokers:
        await until(lambda broker=broker: holds(broker, ["a"]))


async def test_a_pull_outlives_a_flush_where_it_was_granted(
    brokers: list[BrokerClient], redis_server: RedisServer
) -> None:
    one, _ = brokers
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    (pull,) = await one.transfers("r", [(CHUNKS[0], ["a"])])
    with redis_server.client() as client:
        client.flushall()
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    assert await one.renew("r", pull.pull)


async def test_a_pull_outlives_the_broker_that_granted_it(
    brokers: list[BrokerClient], processes: list[ServiceProcess], tmp_path: Path
) -> None:
    one, two = brokers
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    (pull,) = await one.transfers("r", [(CHUNKS[0], ["a"])])
    processes[0].stop(signal.SIGKILL)
    renewal = await two.renew("r", pull.pull)
    assert renewal is not None
    verifier = TicketVerifier(read_ticket_keys(tmp_path / "ticket-keys"), "a")
    assert [verifier.verify(ticket).requester for ticket in (pull.ticket, renewal.ticket)] == [
        "r",
        "r",
    ]
    assert [found.num_pulls for found in await two.peers()] == [1]
    await two.done("r", [pull.pull])
    assert [found.num_pulls for found in await two.peers()] == [0]


async def test_an_order_to_drain_that_could_miss_its_peer_is_refused(
    brokers: list[BrokerClient], redis_server: RedisServer
) -> None:
    one, two = brokers
    await one.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)
    redis_server.pause()
    try:
        with pytest.raises(UnavailableError, match="status 503"):
            await one.drain("a")
    finally:
        redis_server.resume()

    async def is_accepted() -> bool:
        try:
            await one.drain("a")
        except UnavailableError:
            return False
        return True

    await until(is_accepted)
    assert (await two.register(peer("a"), load=0.0, ttl_ms=LEASE_MS)).draining


async def test_the_page_of_both_shows_the_same(
    brokers: list[BrokerClient], processes: list[ServiceProcess]
) -> None:
    first = PeerFigures(requested_chunks=5, loaded_bytes={"memory": 50}, pulled_bytes={"b": 30})
    await brokers[0].register(peer("a"), load=0.5, ttl_ms=LEASE_MS, figures=first)
    await brokers[1].register(
        peer("b"), load=0.5, ttl_ms=LEASE_MS, figures=PeerFigures(requested_chunks=2)
    )

    def seen(process: ServiceProcess) -> dict[str, object]:
        body = httpx.get(
            f"{process.url}/v1/overview", params={"max_samples": 0}, timeout=30.0, trust_env=False
        ).json()
        return {
            "ids": [one["id"] for one in body["peers"]],
            **{name: body[name] for name in ("links", "totals", "is_shared")},
        }

    async def is_the_same() -> bool:
        one, two = [await asyncio.to_thread(seen, process) for process in processes]
        return one == two and one["ids"] == ["a", "b"] and bool(one["links"])

    await until(is_the_same)
    one = await asyncio.to_thread(seen, processes[0])
    assert (one["ids"], one["is_shared"]) == (["a", "b"], True)
    assert one["links"] == [{"requester": "a", "server": "b", "num_bytes": 30}]
    totals = one["totals"]
    assert isinstance(totals, dict)
    assert (totals["requested_chunks"], totals["loaded_bytes"]) == (7, {"memory": 50})
