"""Explanations over REST: where each chunk is, or why it is missing."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_core.lookup import Holder
from lmcache_core.token_database.hashing import chain_hashes, tokens_as_uint32
from lmcache_sidecar.holders import Holders
from lmcache_sidecar.sidecar import SidecarNode

from tests.fixtures.known_holders import KnownHolders, held_by
from tests.fixtures.sidecar_app import ROOT, describe, hash_of, key_of, serving, store

TOKENS = list(range(1000, 1010))
HASHES = [digest.hex() for _, _, digest in chain_hashes(ROOT, tokens_as_uint32(TOKENS), 4)]


async def explain(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/admin/explain", json=body)
    assert response.status_code == 200, response.text
    explanations: list[dict[str, Any]] = response.json()["explanations"]
    return explanations


async def states(client: httpx.AsyncClient, *hashes: str) -> list[dict[str, Any]]:
    """The only state of each chunk."""
    [explanation] = await explain(client, chunk_hashes=list(hashes))
    return [chunk["states"][0] for chunk in explanation["chunks"]]


async def test_a_hot_chunk_is_described(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe())
        await store(parts, key_of(HASHES[0]))
        await client.post("/v1/admin/pin", json={"chunk_hashes": HASHES[:1]})
        [state] = await states(client, HASHES[0])
        [place] = state["places"]
        expected = {"tier": "memory", "state": "present", "num_holders": 1, "lossy": False}
        assert {name: place[name] for name in expected} == expected
        assert place["num_bytes"] > 1000
        assert place["age_s"] >= 0
        assert (state["missing"], state["is_pinned"]) == (None, True)


async def test_every_rank_and_group_counts(tmp_path: Path) -> None:
    groups = ("", "w")
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe(world_size=2, groups=groups))
        keys = [key_of(HASHES[0], rank, group, 2) for rank in range(2) for group in groups]
        await store(parts, *keys[:-1])
        [explanation] = await explain(client, chunk_hashes=HASHES[:1])
        [chunk] = explanation["chunks"]
        assert (chunk["is_complete"], chunk["start"], chunk["end"]) == (False, None, None)
        assert [(state["rank"], state["group"], state["missing"]) for state in chunk["states"]] == [
            (0, "", None),
            (0, "w", None),
            (1, "", None),
            (1, "w", "never_stored"),
        ]


async def test_question_is_no_access(tmp_path: Path) -> None:
    async with serving(tmp_path, eviction_policy="lru") as (client, parts):
        parts.descriptions.note(describe())
        await store(parts, key_of(HASHES[0]), key_of(HASHES[1]))
        coldest = parts.stack.hot.hottest()[-1][0].key.chunk_hash
        await states(client, coldest)
        assert parts.stack.hot.hottest()[-1][0].key.chunk_hash == coldest


async def test_reasons_of_missing_chunks(tmp_path: Path) -> None:
    disk = {"disk_path": tmp_path / "disk", "disk_gb": 0.01}
    async with serving(tmp_path, **disk) as (client, parts):
        parts.descriptions.note(describe())
        await store(parts, *(key_of(chunk_hash) for chunk_hash in HASHES))
        await parts.stack.drain(60)
        [state] = await states(client, HASHES[0])
        assert [place["tier"] for place in state["places"]] == ["memory", "disk"]
        parts.stack.hot.evict_bytes(1 << 30)
        name = key_of(HASHES[0]).key.canonical()
        records = list((tmp_path / "disk").rglob("*.kvr"))
        [victim] = [path for path in records if name in path.read_bytes()]
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
        await parts.stack.batched_get([key_of(HASHES[0])])
        damaged, on_disk, never = await states(client, HASHES[0], HASHES[1], hash_of("never"))
        assert (damaged["places"], never["places"]) == ([], [])
        assert damaged["missing"] == "quarantined"
        assert [(place["tier"], place["lossy"]) for place in on_disk["places"]] == [("disk", False)]
        assert never["missing"] == "never_stored"


class HangingRemote:
    name = "storage"

    async def batched_contains(self, keys: object) -> list[bool]:
        await asyncio.Event().wait()
        return []


def use(
    parts: SidecarNode, lookup: KnownHolders | None = None, remote: object | None = None
) -> None:
    parts.holders = None if lookup is None else Holders(lookup, "test")  # type: ignore[arg-type]
    parts.tiers = dataclasses.replace(parts.tiers, remote=remote)  # type: ignore[arg-type]


async def test_peers_are_named(tmp_path: Path) -> None:
    first_id, third_id = (key_of(HASHES[i]).key.chunk_id() for i in (0, 2))
    holders = {
        first_id: [
            Holder("b", "sidecar", "memory", 1),
            Holder("c", "sidecar", "memory", 1),
            Holder("b", "sidecar", "disk", 1),
        ],
        **held_by("c", third_id),
    }
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe())
        use(parts, KnownHolders(holders))
        first, second, third = await states(client, *HASHES)
        assert [(place["tier"], place["peers"]) for place in first["places"]] == [
            ("peers", ["b", "c"])
        ]
        assert (second["places"], second["missing"]) == ([], "never_stored")
        assert third["places"][0]["peers"] == ["c"]


async def test_tier_that_does_not_answer_is_unknown(tmp_path: Path) -> None:
    async with serving(tmp_path, tier_timeout_s=0.3) as (client, parts):
        parts.descriptions.note(describe())
        await store(parts, key_of(HASHES[0]))
        use(parts, KnownHolders(hangs=True), HangingRemote())
        first, second, third = await states(client, *HASHES)
        assert (first["places"][0]["tier"], first["places"][0]["state"]) == ("memory", "present")
        assert first["missing"] is None
        assert (second["missing"], third["missing"]) == ("unknown", "unknown")
        assert {(place["tier"], place["state"]) for place in third["places"]} == {
            ("peers", "unknown"),
            ("storage", "unknown"),
        }


async def test_the_remote_tier_is_asked_past_its_breaker(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    async with serving(tmp_path, remote_url=f"file://{tmp_path}/shared") as (client, parts):
        parts.descriptions.note(describe())
        await store(parts, key_of(HASHES[0]))
        await parts.stack.drain(60)
        parts.stack.hot.clear_now()
        first, second = await states(client, HASHES[0], HASHES[1])
        assert [(place["tier"], place["lossy"]) for place in first["places"]] == [("storage", None)]
        assert second["missing"] == "never_stored"


async def test_a_chunk_that_an_engine_is_storing_is_promised(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe())
        parts.stack.expected.add(key_of(HASHES[0]))
        first, second = await states(client, HASHES[0], HASHES[1])
        assert (first["missing"], second["missing"]) == ("promised", "never_stored")
        await store(parts, key_of(HASHES[0]))
        assert (await states(client, HASHES[0]))[0]["missing"] is None


async def test_latest_descriptions_are_explained_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        for number in range(6):
            parts.descriptions.note(describe(root=bytes([number]) * 32))
        response = (await client.post("/v1/admin/explain", json={"token_ids": TOKENS})).json()
        assert (len(response["explanations"]), response["num_not_explained"]) == (4, 2)
        expected = [
            next(chain_hashes(bytes([n]) * 32, tokens_as_uint32(TOKENS), 4))[2].hex()
            for n in (5, 4, 3, 2)
        ]
        assert [
            explanation["chunks"][0]["chunk_hash"] for explanation in response["explanations"]
        ] == expected
        assert len(await explain(client, chunk_hashes=HASHES)) == 1, "a hash knows its root"


async def test_it_is_served_on_loopback_only(tmp_path: Path) -> None:
    async with serving(tmp_path, host="10.0.0.1", allow_anonymous=True) as (client, parts):
        parts.descriptions.note(describe())
        for response in (
            await client.post("/v1/admin/explain", json={"token_ids": TOKENS}),
            await client.get("/v1/admin/lookups", params={"request_id": "a"}),
        ):
            assert response.status_code == 403
            assert "loopback" in response.json()["detail"]


async def test_invalid_bodies_are_problems_and_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bodies: list[dict[str, object]] = [
        {"token_ids": [-1]},
        {"token_ids": ["31337x"]},
        {"token_ids": [1], "chunk_hashes": HASHES},
        {"chunk_hashes": ["xyz"]},
    ]
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe())
        for body in bodies:
            response = await client.post("/v1/admin/explain", json=body)
            assert response.status_code == 422, body
            assert response.headers["content-type"] == "application/problem+json"
            assert "31337" not in response.text + caplog.text


async def test_number_of_tokens_is_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe(chunk_size=256))
        [explanation] = await explain(client, token_ids=[7] * 131_072)
        assert len(explanation["chunks"]) == 512
        assert (
            await client.post("/v1/admin/explain", json={"token_ids": [7] * 131_073})
        ).status_code == 422
    async with serving(tmp_path) as (client, parts):
        parts.descriptions.note(describe(chunk_size=1))
        response = await client.post("/v1/admin/explain", json={"token_ids": [7] * 10_000})
        assert response.status_code == 400
        assert "ask for 8192 chunks or fewer" in response.json()["detail"]
