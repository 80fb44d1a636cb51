"""Replicas of `lmcache-lookup` as real processes over a real Redis Cluster, one of whose masters
stands still.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import Holding, InstanceReporter, LookupClient, ReporterTiming
from lmcache_lookup.index.packing import LEASES_KEY

from tests.fixtures.redis_cluster import running_cluster
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.waiting import opened, until

CHUNKS = [bytes([place]) * 16 for place in range(0, 256, 4)]
"""One in each bucket."""
TIMING = ReporterTiming(ttl_ms=6_000, gather_s=0.0, retry_s=0.02, max_retry_s=0.2)


async def is_ready(service: ServiceProcess) -> bool:
    async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as plain:
        return (await plain.get("/readyz")).json()["status"] == "ok"


async def all_are_held(client: LookupClient) -> bool:
    try:
        return (await client.lookup(CHUNKS)).num_prefix == len(CHUNKS)
    except UnavailableError:
        return False


async def nothing_is_held(client: LookupClient) -> bool:
    answer = await client.lookup(CHUNKS)
    return not answer.degraded and answer.num_prefix == 0


async def test_a_replica_that_only_looks_up_follows_a_failover(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(node_timeout_ms=1000))
        environ = {
            "LMCACHE_LOOKUP_PORT": "0",
            "LMCACHE_LOOKUP_REDIS_URL": cluster.url,
            "LMCACHE_LOOKUP_MIN_TTL_MS": "50",
        }
        services = []
        for name in ("reported", "asked"):
            (tmp_path / name).mkdir()
            services.append(
                stack.enter_context(running_service("lmcache_lookup", tmp_path / name, environ))
            )
        reported, asked = services
        async with (
            opened(LookupClient(reported.url, None, timeout_s=60)) as reporting,
            opened(LookupClient(asked.url, None, timeout_s=60)) as asker,
        ):
            reporter = InstanceReporter(
                reporting,
                "one",
                "sidecar",
                lambda: [Holding(chunk_id, "hot", 7) for chunk_id in CHUNKS],
                TIMING,
            )
            async with opened(reporter):
                await until(lambda: all_are_held(asker))
                assert await is_ready(asked)
                place = cluster.place_of(LEASES_KEY)
                cluster.servers[place].pause()
                assert (await asker.lookup(CHUNKS)).degraded
                assert not await is_ready(asked)
                cluster.wait_for_failover(place)
                await until(lambda: all_are_held(asker))
                await until(lambda: is_ready(asked))
                await until(lambda: is_ready(reported))
                cluster.servers[place].resume()
                await until(lambda: all_are_held(asker))
            # By its word, or when its lease has run out.
            await until(lambda: nothing_is_held(asker))
        assert "redis-cluster://" not in reported.output + asked.output
