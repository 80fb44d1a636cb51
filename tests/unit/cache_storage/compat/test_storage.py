"""The listener for LMCache clients as part of the storage: its tenant, quotas, time to live,
drain.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from lmcache_core.keys import CacheEngineKey
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_storage.app import create_app
from lmcache_storage.settings import StorageSettings

from tests.fixtures.compat import ABOUT, compat_client, storage_with_compat
from tests.fixtures.storage_app import bearer, write_tokens
from tests.suites.chunks import make_key, make_record

MIB = 1 << 20
URL = f"/v1/chunks/{CacheEngineKey('lmcache-v0.3+', '', 1, 0, 'k').to_url()}"


async def test_it_is_the_tenant_that_it_is_bound_to(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.yaml")
    async with (
        storage_with_compat(auth_tokens_file=tokens) as (rest, port, _),
        compat_client(port) as client,
    ):
        await client.put("k", b"value")
        assert await client.exists("k")
        for name, status in (("acme", 200), ("rival", 404)):
            assert (await rest.head(URL, headers=bearer(name))).status_code == status
        cleared = await rest.post(
            "/v1/admin/clear", json={"tenant": "rival"}, headers=bearer("operator")
        )
        assert cleared.json() == {"num_chunks": 0}
        assert await client.exists("k")
        listed = (await rest.get("/v1/chunks", headers=bearer("acme"))).json()["chunks"]
        assert [f"/v1/chunks/{entry['key']}" for entry in listed] == [URL]
        assert (await rest.delete(URL, headers=bearer("acme"))).status_code == 204
        assert await client.get("k") is None


async def test_values_stay_within_the_tenants_quota_and_the_oldest_give_place() -> None:
    async with (
        storage_with_compat(tenant_quotas={"acme": {"memory_gb": 4 / 1024}}) as (_, port, _),
        compat_client(port) as client,
    ):
        for i in range(20):
            await client.put(f"k{i}", bytes([i]) * MIB)
        held = [i for i in range(20) if await client.get(f"k{i}") is not None]
        assert 1 <= len(held) <= 4
        assert held[-1] == 19


async def test_only_what_a_client_is_sent_counts_as_served() -> None:
    """A PUT is compared with what is there; that is nobody's answer, and no miss of anybody's."""
    async with storage_with_compat() as (rest, port, _), compat_client(port) as client:
        for value in (b"value", b"value", b"other"):
            await client.put("k", value)
            assert await client.exists("k")
        text = (await rest.get("/metrics")).text
        samples = {
            line.split(" ")[0]: float(line.split(" ")[1])
            for line in text.splitlines()
            if line.startswith("lmcache_storage_")
        }
        assert samples["lmcache_storage_stored_chunks_total"] == 2
        assert not [
            name
            for name in samples
            if name.startswith(("lmcache_storage_served_", "lmcache_storage_missed_"))
            and samples[name]
        ]
        assert await client.get("k") == (ABOUT, b"other")
        assert (
            'lmcache_storage_served_chunks_total{tier="memory"} 1.0'
            in (await rest.get("/metrics")).text
        )


async def test_a_draining_instance_takes_nothing_new_and_goes_on_serving() -> None:
    async with storage_with_compat() as (rest, port, _), compat_client(port) as client:
        await client.put("before", bytes(MIB))
        assert await client.exists("before")
        assert (await rest.post("/v1/admin/drain")).status_code == 200
        await client.put("after", b"value")
        assert await client.get("after") is None
        assert await client.get("before") == (ABOUT, bytes(MIB))


async def test_values_stay_at_the_server_where_their_client_looks_for_them(tmp_path: Path) -> None:
    """Chunks of engines move to their homes among several servers; an LMCache client knows one
    server.
    """
    disk = {"disk_path": tmp_path / "disk", "disk_gb": 0.01}
    async with (
        storage_with_compat(lmcache_compat_tenant="default", **disk) as (rest, port, parts),
        compat_client(port) as client,
    ):
        await client.put("k", b"value")
        assert await client.exists("k")
        assert (
            await rest.put(f"/v1/chunks/{make_key('a').key.to_url()}", content=make_record("a"))
        ).status_code == 201
        async with asyncio.timeout(60):
            while not (stats := (await rest.get("/v1/stats")).json())["settled"]:
                await asyncio.sleep(0.01)
        assert [tier["num_chunks"] for tier in stats["tiers"].values()] == [2, 2]
        listed = await rest.get("/v1/chunks")
        assert len(listed.json()["chunks"]) == 2
        hot, disk_tier = parts.local_tiers
        assert isinstance(hot, LocalCPUBackend)
        assert isinstance(disk_tier, DiskBackend)
        moving = parts.drain._handover._chunks  # type: ignore[attr-defined]
        assert [key for key, _ in moving.hottest_first()] == [make_key("a")]
        hot.clear_now()
        assert [key for key, _ in moving.hottest_first()] == [make_key("a")]


async def test_the_largest_record_bounds_a_value() -> None:
    async with storage_with_compat(max_record_mb=1) as (_, port, _):
        async with compat_client(port) as client:
            await client.put("k", bytes(MIB - 1024))
            assert await client.get("k") == (ABOUT, bytes(MIB - 1024))
        async with compat_client(port) as client:
            await client.put("too large", bytes(MIB))
            assert await client.raw.is_closed()


async def test_the_older_dialect() -> None:
    async with (
        storage_with_compat(lmcache_compat_dialect="v0.2") as (_, port, _),
        compat_client(port, "v0.2") as client,
    ):
        await client.put("vllm@model@1@0@ab", b"value")
        assert await client.get("vllm@model@1@0@ab") == (ABOUT, b"value")


async def test_it_is_off_unless_told() -> None:
    app = create_app(
        StorageSettings(
            lm_port=0, memory_gb=1 / 256, instance_id="storage-0", lmcache_compat_tenant="acme"
        )
    )
    async with app.router.lifespan_context(app):
        assert set(app.state.service.ports) == {"lm_port"}
