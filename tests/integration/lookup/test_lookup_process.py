"""`lmcache-lookup` as a real process, with and without a real Redis, through our own client."""

from __future__ import annotations

import asyncio
import signal
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
TIMING = ReporterTiming(ttl_ms=2_000, gather_s=0.0, retry_s=0.02, max_retry_s=0.2)
SETTINGS = {
    "LMCACHE_LOOKUP_PORT": "0",
    "LMCACHE_LOOKUP_MIN_TTL_MS": "50",
    "LMCACHE_LOOKUP_REDIS_TIMEOUT_MS": "500",
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
    return opened(LookupClient(service.url, token, timeout_s=5))


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
    with httpx.Client(base_url=service.url, trust_env=False, timeout=10) as plain:
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
        assert await prefix(client, A) == [], "each took its holdings along when it ended"


async def test_a_dead_instance_vanishes_with_its_lease(service: ServiceProcess) -> None:
    async with client_of(service) as client:
        lease = await client.renew_instance("mute", incarnation=1, kind="storage", ttl_ms=3_000)
        assert (lease.ttl_ms, lease.resync) == (3_000, False)
        await client.send_events(
            "mute",
            incarnation=1,
            first_sequence=0,
            events=[StoreEvent("store", A, "disk", 3)],
        )
        assert await prefix(client, A) == [["mute"]]
        await until(lambda: _prefix_is(client, [], A))


async def test_a_gap_leads_to_a_resync_that_heals(service: ServiceProcess) -> None:
    async with client_of(service) as client, reporting(client, "one", A) as instance:
        incarnation = instance.reporter.stats["incarnation"]
        ack = await client.send_events(
            "one",
            incarnation=incarnation,
            first_sequence=5,
            events=[StoreEvent("store", B, "hot", 1)],
        )
        assert (ack.next_sequence, ack.resync) == (1, True)
        # A number that the reporter did not send: as if one of its events had been lost on the way.
        await client.send_events(
            "one",
            incarnation=incarnation,
            first_sequence=1,
            events=[StoreEvent("store", B, "hot", 1)],
        )
        instance.held[C] = 9
        instance.reporter.stored(B, "hot", 1)
        instance.reporter.stored(C, "hot", 9)
        await until(lambda: instance.reporter.synced)
        assert await prefix(client, A, C) == [["one"], ["one"]]


async def test_after_a_restart_of_the_service_everything_is_known_again(
    service: ServiceProcess,
) -> None:
    async with client_of(service) as client, reporting(client, "one", A, B):
        port = service.ports["port"]
        assert service.stop() == 0
        with pytest.raises(UnavailableError):
            await client.lookup([A])
        service.environ["LMCACHE_LOOKUP_PORT"] = str(port)
        service.start()
        await until(lambda: _prefix_is(client, [["one"], ["one"]], A, B))


async def test_a_large_prefix_is_one_call(service: ServiceProcess) -> None:
    chunk_ids = [number.to_bytes(16, "little") for number in range(4096)]
    async with client_of(service) as client, reporting(client, "one", *chunk_ids):
        assert (await client.lookup(chunk_ids)).num_prefix == 4096


async def _prefix_is(client: LookupClient, expected: list[list[str]], *chunk_ids: bytes) -> bool:
    try:
        return await prefix(client, *chunk_ids) == expected
    except UnavailableError:
        return False


@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_a_redis_that_refuses_writes_is_still_read(tmp_path: Path, kind: str) -> None:
    """A full one still renews leases, so that instances stay known."""
    with running_redis() as server, server.client() as raw:
        environ = SETTINGS | {
            "LMCACHE_LOOKUP_REDIS_URL": server.url,
            "LMCACHE_LOOKUP_REDIS_TIMEOUT_MS": "9000",
            "LMCACHE_LOOKUP_REDIS_WRITE_TIMEOUT_MS": "9000",
        }
        ttl_ms = 4_000 if kind == "full" else 60_000
        events = [StoreEvent("store", chunk_id, "hot", 1) for chunk_id in (A, B)]
        with running_service("lmcache_lookup", tmp_path, environ) as service:
            async with client_of(service) as client:

                async def renew() -> None:
                    await client.renew_instance("one", incarnation=1, kind="sidecar", ttl_ms=ttl_ms)

                async def send(number: int) -> None:
                    await client.send_events(
                        "one", incarnation=1, first_sequence=number, events=[events[number]]
                    )

                await renew()
                await send(0)
                assert await prefix(client, A) == [["one"]]
                if kind == "full":
                    raw.config_set("maxmemory", "1")
                else:
                    raw.replicaof("127.0.0.1", "1")
                    raw.config_set("replica-serve-stale-data", "yes")
                # Then nothing but sweeps for a while: they may not count as failures of the index.
                for pause_s in (*[ttl_ms / 16_000 if kind == "full" else 0] * 12, 1.5, 1.5, 1.5):
                    if pause_s < 1.5:
                        with pytest.raises(UnavailableError, match="status 503"):
                            await send(1)
                    if kind == "full":
                        await renew()
                    assert await prefix(client, A) == [["one"]]
                    await asyncio.sleep(pause_s)
                ready = get(service, "/readyz")
                assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
                reason = "is full" if kind == "full" else "is read-only"
                assert reason in ready.json()["checks"]["index"]["detail"]
                raw.config_set("maxmemory", "0")
                raw.replicaof("NO", "ONE")
                await send(1)
                assert await prefix(client, A, B) == [["one"], ["one"]]
                assert get(service, "/readyz").json()["status"] == "ok"


async def test_redis_killed_and_back(tmp_path: Path) -> None:
    """Answers keep coming, `/readyz` says what is wrong, events wait; when Redis is back, empty,
    the instance announces itself again.
    """
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
                assert (ready.status_code, ready.json()["status"]) == (200, "degraded"), (
                    "the answers above are quick"
                )
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


async def test_redis_that_hangs_does_not_hold_lookups_up(tmp_path: Path) -> None:
    with running_redis() as server:
        environ = SETTINGS | {
            "LMCACHE_LOOKUP_REDIS_URL": server.url,
            "LMCACHE_LOOKUP_REDIS_TIMEOUT_MS": "1500",
        }
        with running_service("lmcache_lookup", tmp_path, environ) as service:
            async with client_of(service) as client, reporting(client, "one", A):
                server.pause()
                loop = asyncio.get_running_loop()
                for _ in range(3):
                    assert (await client.lookup([A])).degraded
                started = loop.time()
                for _ in range(5):
                    assert (await client.lookup([A])).degraded
                # Five waits for the timeout would take 7.5 s: the breaker has opened.
                assert loop.time() - started < 6.0
                server.resume()
                await until(lambda: _prefix_is(client, [["one"]], A))


async def test_two_replicas_share_redis(tmp_path: Path, server: RedisServer) -> None:
    with server.client() as raw:
        raw.flushall()
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    environ = SETTINGS | {"LMCACHE_LOOKUP_REDIS_URL": server.url}
    with (
        running_service("lmcache_lookup", tmp_path / "1", environ) as first,
        running_service("lmcache_lookup", tmp_path / "2", environ) as second,
    ):
        async with client_of(first) as near, client_of(second) as far:
            lease = await near.renew_instance("one", incarnation=1, kind="sidecar", ttl_ms=60_000)
            assert lease.next_sequence == 0
            await far.send_events(
                "one",
                incarnation=1,
                first_sequence=0,
                events=[StoreEvent("store", A, "hot", 1)],
            )
            await near.send_events(
                "one",
                incarnation=1,
                first_sequence=1,
                events=[StoreEvent("store", B, "hot", 1)],
            )
            assert await prefix(far, A, B) == [["one"], ["one"]]
            await near.end_instance("one")
            assert await prefix(far, A, B) == []


async def test_it_starts_without_redis_and_waits_for_it(tmp_path: Path) -> None:
    server = RedisServer()
    with running_service(
        "lmcache_lookup", tmp_path, SETTINGS | {"LMCACHE_LOOKUP_REDIS_URL": server.url}
    ) as service:
        away = (
            f"dependency unavailable: check=index error=redis at 127.0.0.1:{server.port} cannot be"
            " reached"
        )
        await until(lambda: away in service.output)
        assert get(service, "/readyz").json()["status"] == "degraded"
        server.start()
        try:
            async with client_of(service) as client, reporting(client, "one", A):
                assert await prefix(client, A) == [["one"]]
                await until(lambda: "dependency available again: check=index" in service.output)
        finally:
            server.kill()


async def test_tokens_keep_tenants_and_roles_apart(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "tokens:\n"
        "  - {name: vllm, tenant: acme, role: client, token: acme-client-0123456789}\n"
        "  - {name: rival, tenant: rival, role: client, token: rival-client-0123456789}\n"
        "  - {name: storage, tenant: ops, role: admin, token: ops-admin-0123456789}\n"
    )
    with running_service(
        "lmcache_lookup", tmp_path, SETTINGS | {"LMCACHE_LOOKUP_AUTH_TOKENS_FILE": str(tokens)}
    ) as service:
        async with (
            client_of(service, "acme-client-0123456789") as acme,
            client_of(service, "rival-client-0123456789") as rival,
            client_of(service, "ops-admin-0123456789") as ops,
            client_of(service) as nobody,
        ):
            await ops.renew_instance("s-0", incarnation=1, kind="storage", ttl_ms=60_000)
            events = [
                StoreEvent("store", A, "disk", 1, "acme"),
                StoreEvent("store", B, "disk", 1),
            ]
            await ops.send_events("s-0", incarnation=1, first_sequence=0, events=events)
            assert await prefix(acme, A) == [["s-0"]]
            assert await prefix(rival, A) == []
            assert await prefix(ops, B) == [["s-0"]]
            with pytest.raises(UnavailableError, match="status 403"):
                await rival.renew_instance("s-0", incarnation=9, kind="storage", ttl_ms=60_000)
            await rival.renew_instance("s-0", incarnation=9, kind="sidecar", ttl_ms=60_000)
            assert await prefix(acme, A) == [["s-0"]]
            with pytest.raises(UnavailableError, match="status 403"):
                await rival.send_events("s-0", incarnation=9, first_sequence=0, events=events)
            with pytest.raises(UnavailableError, match="status 401"):
                await nobody.lookup([A])
        with httpx.Client(
            base_url=service.url,
            headers={"authorization": "Bearer acme-client-0123456789"},
            trust_env=False,
        ) as plain:
            assert plain.post("/v1/admin/clear").status_code == 403
            assert plain.get("/v1/instances").json() == {"instances": []}
        assert "0123456789" not in service.output


def test_ctrl_c_is_a_clean_end(tmp_path: Path) -> None:
    service = ServiceProcess("lmcache_lookup", tmp_path, SETTINGS)
    service.start()
    assert service.stop(signal.SIGINT) == 0
    assert "Traceback" not in service.output
