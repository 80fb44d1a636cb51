"""`lmcache-lookup` as a real process, with and without a real Redis, through our own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import Holding, InstanceReporter, LookupClient, ReporterTiming, StoreEvent

from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.waiting import opened, until

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
TIMING = ReporterTiming(ttl_ms=6_000, gather_s=0.0, retry_s=0.02, max_retry_s=0.2)
SETTINGS = {
    "LMCACHE_LOOKUP_PORT": "0",
    "LMCACHE_LOOKUP_MIN_TTL_MS": "50",
    "LMCACHE_LOOKUP_REDIS_TIMEOUT_MS": "9000",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as redis_server:
        yield redis_server


@pytest.fixture(params=["embedded", "redis"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceProcess]:
    environ = dict(SETTINGS)
    if request.param == "redis":
        environ["LMCACHE_LOOKUP_REDIS_URL"] = request.getfixturevalue("server").url
        with request.getfixturevalue("server").client() as raw:
            raw.flushall()
    with running_service("lmcache_lookup", tmp_path, environ) as process:
        yield process


def client_of(
    service: ServiceProcess, token: str | None = None
) -> AbstractAsyncContextManager[LookupClient]:
    return opened(LookupClient(service.url, token, timeout_s=60))


@pytest.mark.parametrize("service", ["embedded"], indirect=True)
def test_head_is_answered_as_get_without_the_body(service: ServiceProcess) -> None:
    with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as client:
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/"):
            whole, head = client.get(path), client.head(path)
            assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
            assert head.headers["content-type"] == whole.headers["content-type"]
        assert (client.head("/v1/lookup").status_code, client.head("/x").status_code) == (405, 404)
        assert 'method="HEAD",route="/healthz",status="200"' in client.get("/metrics").text


class Instance:
    """Holds chunks and reports them."""

    def __init__(self, client: LookupClient, name: str, chunk_ids: Sequence[bytes]) -> None:
        self.held = dict.fromkeys(chunk_ids, 7)
        self.reporter = InstanceReporter(client, name, "sidecar", self.snapshot, TIMING)

    def snapshot(self) -> list[Holding]:
        return [Holding(chunk_id, "hot", size) for chunk_id, size in list(self.held.items())]


@asynccontextmanager
async def reporting(client: LookupClient, name: str, *chunk_ids: bytes) -> AsyncIterator[Instance]:
    instance = Instance(client, name, chunk_ids)
    async with opened(instance.reporter):
        await until(lambda: instance.reporter.synced)
        yield instance


async def prefix(
    client: LookupClient, *chunk_ids: bytes, exclude: Sequence[str] = ()
) -> list[list[str]]:
    answer = await client.lookup(chunk_ids, exclude)
    return [sorted(holder.instance for holder in holders) for holders in answer.holders]


def get(service: ServiceProcess, path: str) -> httpx.Response:
    with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as plain:
        return plain.get(path)


async def test_two_instances_are_found_by_prefix_and_route_until_they_end(
    service: ServiceProcess,
) -> None:
    async with (
        client_of(service) as client,
        reporting(client, "one", A, B),
        reporting(client, "two", A),
    ):
        assert await prefix(client, A, B, C) == [["one", "two"], ["one"]]
        assert await prefix(client, C, A) == []
        assert await prefix(client, A, B, exclude=["one"]) == [["two"]]
        route = await client.route([A, B, C])
        assert [(entry.instance, entry.num_prefix) for entry in route.instances] == [
            ("one", 2),
            ("two", 1),
        ]
        stats = get(service, "/v1/stats").json()
        assert (stats["num_chunks"], stats["num_instances"], stats["degraded"]) == (2, 2, False)
    async with client_of(service) as client:
        assert await prefix(client, A) == [], "the holdings of an instance end with it"


async def _prefix_is(client: LookupClient, expected: list[list[str]], *chunk_ids: bytes) -> bool:
    try:
        return await prefix(client, *chunk_ids) == expected
    except UnavailableError:
        return False


async def test_a_full_redis_is_still_read_and_renews_leases(tmp_path: Path) -> None:
    with running_redis() as server, server.client() as raw:
        environ = SETTINGS | {
            "LMCACHE_LOOKUP_REDIS_URL": server.url,
            "LMCACHE_LOOKUP_REDIS_WRITE_TIMEOUT_MS": "9000",
        }
        events = [StoreEvent("store", chunk_id, "hot", 1) for chunk_id in (A, B)]
        with running_service("lmcache_lookup", tmp_path, environ) as service:
            async with client_of(service) as client:

                async def renew() -> None:
                    await client.renew_instance("one", incarnation=1, kind="sidecar", ttl_ms=60_000)

                async def send(number: int) -> None:
                    await client.send_events(
                        "one", incarnation=1, first_sequence=number, events=[events[number]]
                    )

                await renew()
                await send(0)
                assert await prefix(client, A) == [["one"]]
                raw.config_set("maxmemory", "1")
                for _ in range(12):  # More refusals than open the breaker.
                    with pytest.raises(UnavailableError, match="status 503"):
                        await send(1)
                    await renew()
                    assert await prefix(client, A) == [["one"]]
                ready = get(service, "/readyz")
                assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
                assert "is full" in ready.json()["checks"]["index"]["detail"]
                raw.config_set("maxmemory", "0")
                await send(1)
                assert await prefix(client, A, B) == [["one"], ["one"]]
                assert get(service, "/readyz").json()["status"] == "ok"


async def test_a_killed_redis_degrades_answers_until_it_is_back(tmp_path: Path) -> None:
    """Events wait; when Redis is back, empty, the instance announces its chunks again."""
    with running_redis() as server:
        environ = SETTINGS | {"LMCACHE_LOOKUP_REDIS_URL": server.url}
        with running_service("lmcache_lookup", tmp_path, environ) as service:
            async with client_of(service) as client, reporting(client, "one", A) as instance:
                assert get(service, "/readyz").json()["status"] == "ok"
                server.kill()
                for _ in range(10):
                    answer = await client.lookup([A])
                    assert (answer.num_prefix, answer.degraded) == (0, True)
                assert (await client.route([A])).degraded
                ready = get(service, "/readyz")
                assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
                assert f"127.0.0.1:{server.port}" in ready.json()["checks"]["index"]["detail"]
                assert get(service, "/healthz").status_code == 200
                assert get(service, "/v1/stats").json() == {
                    "index": "redis",
                    "degraded": True,
                    "num_chunks": None,
                    "num_instances": None,
                }
                with pytest.raises(UnavailableError, match="status 503"):
                    await client.send_events("one", incarnation=1, first_sequence=0, events=[])
                instance.held[B] = 7
                instance.reporter.stored(B, "hot", 7)
                server.start()
                await until(lambda: _prefix_is(client, [["one"], ["one"]], A, B))
                assert get(service, "/readyz").json()["status"] == "ok"
            assert "redis://" not in service.output
