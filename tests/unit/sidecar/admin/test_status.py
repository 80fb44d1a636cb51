"""Status, clients, clear and drain over REST."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lmcache_core.sidecar import SidecarConnection
from lmcache_core.wire import messages as m

from tests.fixtures.embedded import PATIENCE_S
from tests.fixtures.sidecar_app import describe, hash_of, key_of, serving, store

KEYS = [key_of(hash_of(i)) for i in range(3)]
DISK = {"disk_gb": 0.01}


async def test_drain_and_undrain_are_reported(tmp_path: Path) -> None:
    async with serving(tmp_path, remote_url=f"file://{tmp_path}/nowhere", accept_handover=True) as (
        client,
        parts,
    ):
        await store(parts, *KEYS)
        begun = (await client.post("/v1/admin/drain?wait=false")).json()
        assert begun["draining"]
        assert (begun["drain"]["state"], begun["drain"]["left"]) == ("writing", len(KEYS))
        assert (await client.get("/v1/status")).json()["draining"]
        ended = (await client.post("/v1/admin/drain")).json()
        assert ended["settled"]
        assert (ended["drain"]["state"], ended["drain"]["total"], ended["drain"]["left"]) == (
            "done",
            len(KEYS),
            len(KEYS),
        )
        status = (await client.get("/v1/status")).json()
        assert (status["drain"], status["accepts_handover"]) == (ended["drain"], False)
        again = (await client.post("/v1/admin/undrain")).json()
        assert (again["draining"], again["drain"]["state"]) == (False, "serving")
        status = (await client.get("/v1/status")).json()
        assert (status["draining"], status["accepts_handover"]) == (False, True)
        parts.descriptions.note(describe())
        pinned = await client.post("/v1/admin/pin", json={"chunk_hashes": [hash_of(0)]})
        assert pinned.json()["num_pinned"] == 1
        metrics = (await client.get("/metrics")).text
        assert f'lmcache_sidecar_drained_chunks_total{{outcome="left"}} {len(KEYS)}.0' in metrics


@pytest.mark.parametrize(
    ("body", "kept"),
    [(None, (0, 0)), ({"tiers": ["memory"]}, (0, 3)), ({"tiers": ["disk"]}, (3, 0))],
)
async def test_clear_names_tiers(
    tmp_path: Path, body: dict[str, object] | None, kept: tuple[int, int]
) -> None:
    async with serving(tmp_path, disk_path=tmp_path / "disk", **DISK) as (client, parts):
        await store(parts, *KEYS)
        await parts.stack.drain(60)
        page = (await client.get("/v1/admin/chunks?limit=2")).json()
        assert (len(page["chunks"]), page["next_offset"]) == (2, 2)
        for other in ({"tiers": ["storage"]}, {"tiers": []}, {"tier": "memory"}):
            assert (await client.post("/v1/admin/clear", json=other)).status_code == 422
        assert (await client.post("/v1/admin/clear", json=body)).json() == {"num_chunks": len(KEYS)}
        tiers = (await client.get("/v1/tiers")).json()["tiers"]
        assert (tiers["memory"]["num_chunks"], tiers["disk"]["num_chunks"]) == kept


async def test_clients_are_listed(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        engine = m.EngineInfo("engine", 7, 1, "org/model", "layout", 2)
        hello = m.engine_hello(engine, ["role:kv_producer"])
        connection = SidecarConnection(tmp_path / "s.sock", hello, PATIENCE_S)
        await asyncio.to_thread(connection.open)
        try:
            await asyncio.to_thread(
                connection.call, describe(world_size=2, groups=("", "window")), m.Ok
            )
            await asyncio.to_thread(connection.call, m.ReserveExtents((1000,)), m.Extents)
            [listed] = (await client.get("/v1/clients")).json()["clients"]
            status = (await client.get("/v1/status")).json()
        finally:
            await asyncio.to_thread(connection.close)
        expected = {
            "client": "engine",
            "pid": 7,
            "rank": 1,
            "world_size": 2,
            "model": "org/model",
            "role": "kv_producer",
            "num_reservations": 1,
            "reserved_bytes": 1024,
            "num_pins": 0,
            "pinned_bytes": 0,
        }
        assert {name: listed[name] for name in expected} == expected
        # Without the root, which holds the salt.
        assert listed["descriptions"] == [
            {
                "fmt": "vllm",
                "model_name": "org/model",
                "world_size": 2,
                "chunk_size": 4,
                "groups": ["", "window"],
            }
        ]
        assert (status["num_clients"], status["reserved_bytes"]) == (1, 1024)
        assert len(parts.descriptions) == 1
