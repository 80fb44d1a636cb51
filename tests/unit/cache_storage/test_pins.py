"""Pins over REST: by tenant, bounded, until a drain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.fixtures.storage_app import bearer, serving, write_tokens
from tests.suites.chunks import make_key, make_payload, make_record

NAMES = ["a", "b", "c"]
URLS = [make_key(name).key.to_url() for name in NAMES]
CHUNK_BYTES = 500_000  # of the 4 MiB of `serving`, half of which may be pinned


async def put(rest: httpx.AsyncClient, name: object, headers: dict[str, str] | None = None) -> None:
    record = make_record(name, make_payload(name, CHUNK_BYTES))
    answer = await rest.put(
        f"/v1/chunks/{make_key(name).key.to_url()}", content=record, headers=headers
    )
    assert answer.status_code == 201


async def test_pinned_chunks_are_listed_and_not_evicted() -> None:
    never = make_key("never").key.to_url()
    async with serving(eviction_policy="lru") as (rest, _):
        for name in NAMES:
            await put(rest, name)
        answer = (await rest.post("/v1/admin/pin", json={"keys": [*URLS[:2], never]})).json()
        assert answer["num_pinned"] == 2
        assert answer["not_pinned"] == [{"key": never, "reason": "never_stored"}]
        assert 2 * CHUNK_BYTES <= answer["pinned_bytes"] <= answer["max_pinned_bytes"]
        for i in range(20):
            await put(rest, i)
        statuses = [(await rest.head(f"/v1/chunks/{url}")).status_code for url in URLS]
        assert statuses == [200, 200, 404]
        pins = (await rest.get("/v1/admin/pins")).json()["pins"]
        assert [(pin["key"], pin["tenant"]) for pin in pins] == [
            (url, "default") for url in URLS[:2]
        ]
        unpinned = await rest.post("/v1/admin/unpin", json={"keys": URLS})
        assert unpinned.json() == {"num_unpinned": 2}


async def test_admins_pin_chunks_of_a_tenant(tmp_path: Path) -> None:
    async with serving(auth_tokens_file=write_tokens(tmp_path / "tokens.yaml")) as (rest, _):
        await put(rest, "a", bearer("acme"))
        body = {"keys": URLS[:1], "tenant": "acme"}
        operator = bearer("operator")

        async def ask(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            answer = await rest.post(f"/v1/admin/{path}", json=body, headers=operator)
            return dict(answer.json())

        assert (await ask("pin", {"keys": URLS[:1]}))["num_pinned"] == 0
        assert (await ask("pin", body))["num_pinned"] == 1
        assert await ask("unpin") == {"num_unpinned": 0}
        assert await ask("unpin", {"tenant": "acme"}) == {"num_unpinned": 1}
