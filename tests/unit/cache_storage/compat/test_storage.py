"""The listener for LMCache clients as part of the storage: its tenant, its largest value, drain."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.keys import CacheEngineKey
from lmcache_storage.app import create_app
from lmcache_storage.settings import StorageSettings

from tests.fixtures.compat import ABOUT, compat_client, storage_with_compat
from tests.fixtures.storage_app import bearer, write_tokens
from tests.suites.chunks import make_key, make_record

MIB = 1 << 20
URL = f"/v1/chunks/{CacheEngineKey('lmcache-v0.3+', '', 1, 0, 'k').to_url()}"


async def test_values_belong_to_the_configured_tenant(tmp_path: Path) -> None:
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


async def test_only_values_that_are_sent_count_as_served() -> None:
    """A PUT is compared with the value before it, which is neither served nor missed."""
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


async def test_drain_hands_over_no_value_and_takes_none() -> None:
    """Chunks of engines move to other servers; an LMCache client knows one server."""
    others = {"replicas_url": "lm://127.0.0.1:1"}
    async with (
        storage_with_compat(lmcache_compat_tenant="default", **others) as (rest, port, _),
        compat_client(port) as client,
    ):
        await client.put("k", b"value")
        assert await client.exists("k")
        assert (
            await rest.put(f"/v1/chunks/{make_key('a').key.to_url()}", content=make_record("a"))
        ).status_code == 201
        drained = (await rest.post("/v1/admin/drain")).json()["drain"]
        assert (drained["total"], drained["failed"]) == (1, 1)
        await client.put("late", b"value")
        assert await client.get("late") is None
        assert await client.get("k") == (ABOUT, b"value")


async def test_the_largest_record_bounds_a_value() -> None:
    async with storage_with_compat(max_record_mb=1) as (_, port, _):
        async with compat_client(port) as client:
            await client.put("k", bytes(MIB - 1024))
            assert await client.get("k") == (ABOUT, bytes(MIB - 1024))
        async with compat_client(port) as client:
            await client.put("too large", bytes(MIB))
            assert await client.raw.is_closed(60)


async def test_listener_is_off_by_default() -> None:
    app = create_app(
        StorageSettings(
            lm_port=0, memory_gb=1 / 256, instance_id="storage-0", lmcache_compat_tenant="acme"
        )
    )
    async with app.router.lifespan_context(app):
        assert set(app.state.service.ports) == {"lm_port"}
