"""Pins over REST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.sidecar_app import ARENA_BYTES, MODEL, describe, hash_of, key_of, serving, store

A, B, GONE = hash_of("a"), hash_of("b"), hash_of("gone")


async def pin(client: httpx.AsyncClient, *hashes: str, **more: object) -> dict[str, Any]:
    body = {"chunk_hashes": hashes, **more}
    answer: dict[str, Any] = (await client.post("/v1/admin/pin", json=body)).json()
    return answer


async def pins(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/v1/admin/pins")).json()["pins"]
    return found


async def test_chunks_of_all_ranks_and_groups_are_pinned_listed_and_unpinned(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe("org/other", world_size=3))
        parts.descriptions.note(describe(world_size=2, groups=("", "w")))
        keys = [
            key_of(chunk_hash, rank, group, 2)
            for chunk_hash in (A, B)
            for rank in range(2)
            for group in ("", "w")
        ]
        await store(parts, *keys[:-1])
        answer = await pin(client, A, B, GONE, ttl_s=100)
        assert (answer["num_pinned"], answer["pinned_bytes"]) == (7, 7 * 1024)
        assert answer["max_pinned_bytes"] == ARENA_BYTES // 2
        missing = {"chunk_hash": B, "rank": 1, "group": "w", "reason": "never_stored"}
        assert answer["not_pinned"][0] == missing
        # Four of the model that has some of its chunks, none of the other model's.
        assert [one["chunk_hash"] for one in answer["not_pinned"][1:]] == [GONE] * 4
        listed = await pins(client)
        assert [(one["chunk_hash"], one["rank"], one["group"]) for one in listed] == [
            (key.key.chunk_hash, key.key.worker_id, key.key.group) for key in keys[:-1]
        ]
        assert {one["model_name"] for one in listed} == {MODEL}
        assert all(one["expires_in_s"] <= 100 for one in listed)
        assert (await client.get("/v1/status")).json()["pinned_bytes"] == 7 * 1024
        evicted = await client.post("/v1/admin/evict", json={"num_bytes": 1 << 30})
        assert evicted.json() == {"freed_bytes": 0}
        unpinned = await client.post("/v1/admin/unpin", json={"chunk_hashes": [A]})
        assert unpinned.json() == {"num_unpinned": 4}
        assert (await client.post("/v1/admin/unpin")).json() == {"num_unpinned": 3}
        assert await pins(client) == []


async def test_a_model_may_be_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe("one"))
        parts.descriptions.note(describe("two"))
        await store(parts, key_of(A, model="one"))
        assert (await pin(client, A, model="two"))["num_pinned"] == 0
        assert (await pin(client, A, model="one"))["num_pinned"] == 1
        refused = await pin(client, A, model="three")
        assert refused["status"] == 409
        assert "known: 'two', 'one'" in refused["detail"]


async def test_without_engines_and_in_a_drain_nothing_is_pinned(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        refused = await pin(client, A)
        assert refused["status"] == 409
        assert "an engine must have connected" in refused["detail"]
        parts.descriptions.note(describe())
        await store(parts, key_of(A))
        assert (await pin(client, A))["num_pinned"] == 1
        await client.post("/v1/admin/drain")
        assert await pins(client) == []
        refused = await pin(client, A)
        assert refused["status"] == 409
        assert "draining" in refused["detail"]


@pytest.mark.parametrize(
    "body",
    [
        {"chunk_hashes": [A[:-1]]},
        {"chunk_hashes": [A], "ttl_s": 86401},
        {"chunk_hashes": [A] * 4097},
    ],
)
async def test_invalid_bodies_are_problems(tmp_path: Path, body: dict[str, object]) -> None:
    async with serving(tmp_path) as (client, _):
        response = await client.post("/v1/admin/pin", json=body)
        assert response.status_code == 422
        assert response.headers["content-type"] == "application/problem+json"


async def test_description_with_too_many_keys_costs_the_others_nothing(tmp_path: Path) -> None:
    groups = [str(number) for number in range(8)]
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe())
        parts.descriptions.note(describe("large", world_size=1024, groups=groups), "another")
        await store(parts, key_of(A), key_of(B))
        assert (await pin(client, A, B))["num_pinned"] == 2
        question = {"chunk_hashes": [A, B]}
        answer = (await client.post("/v1/admin/explain", json=question)).json()
        assert [one["model_name"] for one in answer["explanations"]] == [MODEL]
        assert answer["num_not_explained"] == 1
        refused = await client.post("/v1/admin/explain", json=question | {"model": "large"})
        assert refused.status_code == 400
        assert "ask for 1 chunks or fewer" in refused.json()["detail"]
