"""Pins over REST."""

from __future__ import annotations

from pathlib import Path

from tests.fixtures.sidecar_app import ARENA_BYTES, MODEL, describe, hash_of, key_of, serving, store

A, B, GONE = hash_of("a"), hash_of("b"), hash_of("gone")


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
        answer = (
            await client.post("/v1/admin/pin", json={"chunk_hashes": [A, B, GONE], "ttl_s": 100})
        ).json()
        assert answer["num_pinned"] == 7
        assert answer["not_pinned"][0] == {
            "chunk_hash": B,
            "rank": 1,
            "group": "w",
            "reason": "never_stored",
        }
        assert {one["chunk_hash"] for one in answer["not_pinned"][1:]} == {GONE}
        assert len(answer["not_pinned"]) == 1 + 4
        assert (answer["pinned_bytes"], answer["max_pinned_bytes"]) == (7 * 1024, ARENA_BYTES // 2)
        listed = (await client.get("/v1/admin/pins")).json()
        assert [(pin["chunk_hash"], pin["rank"], pin["group"]) for pin in listed["pins"]] == [
            (key.key.chunk_hash, key.key.worker_id, key.key.group) for key in keys[:-1]
        ]
        assert all(
            90 < pin["expires_in_s"] <= 100 and pin["model_name"] == "org/model"
            for pin in listed["pins"]
        )
        assert (await client.get("/v1/status")).json()["pinned_bytes"] == 7 * 1024
        assert (await client.post("/v1/admin/evict", json={"num_bytes": 1 << 30})).json() == {
            "freed_bytes": 0
        }
        assert (await client.post("/v1/admin/unpin", json={"chunk_hashes": [A]})).json() == {
            "num_unpinned": 4
        }
        assert (await client.post("/v1/admin/unpin")).json() == {"num_unpinned": 3}
        assert (await client.get("/v1/admin/pins")).json()["pins"] == []


async def test_a_model_may_be_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe("one"))
        parts.descriptions.note(describe("two"))
        await store(parts, key_of(A, model="one"))
        assert (
            await client.post("/v1/admin/pin", json={"chunk_hashes": [A], "model": "two"})
        ).json()["num_pinned"] == 0
        assert (
            await client.post("/v1/admin/pin", json={"chunk_hashes": [A], "model": "one"})
        ).json()["num_pinned"] == 1
        response = await client.post("/v1/admin/pin", json={"chunk_hashes": [A], "model": "three"})
        assert response.status_code == 409
        assert "known: 'two', 'one'" in response.json()["detail"]


async def test_without_engines_and_in_a_drain_nothing_is_pinned(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (client, parts):
        response = await client.post("/v1/admin/pin", json={"chunk_hashes": [A]})
        assert (response.status_code, response.headers["content-type"]) == (
            409,
            "application/problem+json",
        )
        assert "an engine must have connected" in response.json()["detail"]
        parts.descriptions.note(describe())
        await store(parts, key_of(A))
        await client.post("/v1/admin/pin", json={"chunk_hashes": [A]})
        await client.post("/v1/admin/drain")
        assert (await client.get("/v1/admin/pins")).json()["pins"] == []
        response = await client.post("/v1/admin/pin", json={"chunk_hashes": [A]})
        assert response.status_code == 409
        assert "draining" in response.json()["detail"]


async def test_invalid_bodies_are_problems(tmp_path: Path) -> None:
    bodies: list[dict[str, object]] = [
        {"chunk_hashes": [A[:-1]]},
        {"chunk_hashes": [A], "ttl_s": 86401},
        {"chunk_hashes": [A] * 4097},
    ]
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe())
        for body in bodies:
            response = await client.post("/v1/admin/pin", json=body)
            assert response.status_code == 422, body
            assert response.headers["content-type"] == "application/problem+json"


async def test_description_with_too_many_keys_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe())
        parts.descriptions.note(
            describe("large", world_size=1024, groups=[str(number) for number in range(8)]),
            "another",
        )
        await store(parts, key_of(A), key_of(B))
        assert (await client.post("/v1/admin/pin", json={"chunk_hashes": [A, B]})).json()[
            "num_pinned"
        ] == 2
        answer = (await client.post("/v1/admin/explain", json={"chunk_hashes": [A, B]})).json()
        assert [explanation["model_name"] for explanation in answer["explanations"]] == [MODEL]
        assert answer["num_not_explained"] == 1
        response = await client.post(
            "/v1/admin/explain", json={"chunk_hashes": [A, B], "model": "large"}
        )
        assert response.status_code == 400
        assert "ask for 1 chunks or fewer" in response.json()["detail"]
