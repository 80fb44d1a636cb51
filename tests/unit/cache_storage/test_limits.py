"""Lifetime and quotas reach memory and disk."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.fixtures.storage_app import bearer, serving, write_tokens
from tests.fixtures.waiting import until
from tests.suites.chunks import make_key, make_record

BLOCK_GB = 4096 / (1 << 30)


def url(name: object) -> str:
    return f"/v1/chunks/{make_key(name).key.to_url()}"


async def put(client: httpx.AsyncClient, tenant: str, *names: object) -> None:
    for name in names:
        assert (
            await client.put(url(name), content=make_record(name), headers=bearer(tenant))
        ).status_code == 201


async def num_present(client: httpx.AsyncClient, tenant: str, num: int) -> int:
    keys = [make_key(name).key.to_url() for name in range(num)]
    return sum(
        (
            await client.post("/v1/chunks:contains", json={"keys": keys}, headers=bearer(tenant))
        ).json()["present"]
    )


async def test_a_tenant_has_its_quota_in_memory_and_on_disk(tmp_path: Path) -> None:
    options = {
        "auth_tokens_file": write_tokens(tmp_path / "tokens.yaml"),
        "disk_path": tmp_path / "disk",
        "disk_gb": 0.01,
        "tenant_quota_gb": 0.5 * BLOCK_GB,
        "tenant_disk_quota_gb": 4 * BLOCK_GB,
        "tenant_quotas": {"rival": {"memory_gb": 1, "disk_gb": 1}},
    }
    async with serving(**options) as (client, parts):
        await put(client, "rival", *range(10))
        for name in range(10):
            await put(client, "acme", name)
            # What waits for the disk is in use, and a tenant gives up no chunk that is.
            assert await parts.stack.drain(60)
        assert await num_present(client, "acme", 10) == 4
        assert await num_present(client, "rival", 10) == 10
        assert [parts.stack.hot.clear_now(tenant) for tenant in ("acme", "rival")] == [2, 10]


async def test_chunk_expires_in_memory_and_on_disk(tmp_path: Path) -> None:
    options = {"disk_path": tmp_path / "disk", "disk_gb": 0.01, "chunk_ttl_s": 0.2}
    async with serving(**options) as (client, _):

        async def both_have_expired() -> bool:
            """One that expires before it is written to the disk counts in memory only."""
            await client.put(url("a"), content=make_record("a"))
            lines = (await client.get("/metrics")).text.splitlines()
            expired = [line for line in lines if "expired_chunks" in line and line[-4:] != " 0.0"]
            return all(f'tier="{tier}"' in str(expired) for tier in ("memory", "disk"))

        async def is_a_miss() -> bool:
            answer = await client.get(url("a"))
            return answer.status_code == 404 and "expired" in answer.text

        await until(both_have_expired)
        await until(is_a_miss)
        await until(lambda: not list((tmp_path / "disk").rglob("*.kvr")))
