"""Tenants see nothing of one another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.fixtures.storage_app import assert_problem, bearer, serving, write_tokens
from tests.suites.chunks import make_key, make_payload, make_record

A = make_key("a").key.to_url()


@pytest.fixture
async def rest(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    tokens = write_tokens(tmp_path / "tokens.yaml")
    async with serving(auth_tokens_file=tokens, disk_path=tmp_path / "disk", disk_gb=0.01) as (
        client,
        _,
    ):
        yield client


async def test_tenants_neither_see_nor_harm_one_another(rest: httpx.AsyncClient) -> None:
    acme, rival = make_record("a"), make_record("a", make_payload("another", 900))
    assert (
        await rest.put(f"/v1/chunks/{A}", content=acme, headers=bearer("acme"))
    ).status_code == 201
    assert_problem(await rest.get(f"/v1/chunks/{A}", headers=bearer("rival")), 404, "not-found")
    assert_problem(await rest.delete(f"/v1/chunks/{A}", headers=bearer("rival")), 404, "not-found")
    assert (
        await rest.post("/v1/chunks:contains", json={"keys": [A]}, headers=bearer("rival"))
    ).json() == {"present": [False]}
    assert (
        await rest.post("/v1/chunks:get", json={"keys": [A]}, headers=bearer("rival"))
    ).content == b""
    assert (await rest.get("/v1/chunks", headers=bearer("rival"))).json()["chunks"] == []
    assert (
        await rest.put(f"/v1/chunks/{A}", content=rival, headers=bearer("rival"))
    ).status_code == 201
    assert (await rest.get(f"/v1/chunks/{A}", headers=bearer("acme"))).content == acme
    assert (await rest.get(f"/v1/chunks/{A}", headers=bearer("rival"))).content == rival


async def test_clear_names_tenants(rest: httpx.AsyncClient) -> None:
    async def stored() -> set[str]:
        for name in ("acme", "rival", "operator"):
            await rest.put(f"/v1/chunks/{A}", content=make_record("a"), headers=bearer(name))
        return {name for name in ("acme", "rival", "operator") if await holds(name)}

    async def holds(name: str) -> bool:
        return bool((await rest.get("/v1/chunks", headers=bearer(name))).json()["chunks"])

    async def clear(body: dict[str, object] | None) -> None:
        response = await rest.post("/v1/admin/clear", json=body, headers=bearer("operator"))
        assert response.status_code == 200

    assert await stored() == {"acme", "rival", "operator"}
    await clear(None)
    assert [await holds(name) for name in ("acme", "rival", "operator")] == [True, True, False]
    await clear({"tenant": "acme"})
    assert [await holds(name) for name in ("acme", "rival", "operator")] == [False, True, False]
    assert await stored() == {"acme", "rival", "operator"}
    await clear({"all_tenants": True})
    assert [await holds(name) for name in ("acme", "rival", "operator")] == [False, False, False]
    both = await rest.post(
        "/v1/admin/clear", json={"tenant": "acme", "all_tenants": True}, headers=bearer("operator")
    )
    assert_problem(both, 422, "invalid")
