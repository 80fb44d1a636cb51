"""The REST API of the storage; `tests/contract/rest` has its routes and roles."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_core.lookup import InstanceReporter
from lmcache_core.record import encode_head
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_storage.storage import StorageNode

from tests.fixtures.storage_app import assert_problem, serving
from tests.fixtures.waiting import until
from tests.suites.chunks import make_chunk, make_key, make_record, overstated

A, B = make_key("a").key.to_url(), make_key("b").key.to_url()
PATIENT = ClientOptions(timeout_s=60.0, connect_timeout_s=60.0)
RECORD_TYPE = "application/vnd.lmcache.record"


@pytest.fixture
async def running() -> AsyncIterator[tuple[httpx.AsyncClient, StorageNode]]:
    async with serving() as both:
        yield both


@pytest.fixture
def rest(running: tuple[httpx.AsyncClient, StorageNode]) -> httpx.AsyncClient:
    return running[0]


@pytest.fixture
def parts(running: tuple[httpx.AsyncClient, StorageNode]) -> StorageNode:
    return running[1]


async def test_chunk_is_put_read_and_deleted(rest: httpx.AsyncClient) -> None:
    record = make_record("a")
    assert (await rest.put(f"/v1/chunks/{A}", content=record)).status_code == 201
    assert (await rest.put(f"/v1/chunks/{A}", content=record)).status_code == 204
    got = await rest.get(f"/v1/chunks/{A}")
    assert (got.status_code, got.content) == (200, record)
    assert got.headers["content-type"] == RECORD_TYPE
    assert (await rest.head(f"/v1/chunks/{A}")).status_code == 200
    assert (await rest.delete(f"/v1/chunks/{A}")).status_code == 204
    for method in ("get", "delete"):
        assert_problem(await getattr(rest, method)(f"/v1/chunks/{A}"), 404, "not-found")
    assert (await rest.head(f"/v1/chunks/{A}")).status_code == 404


async def test_miss_has_a_reason(rest: httpx.AsyncClient, parts: StorageNode) -> None:
    await rest.put(f"/v1/chunks/{A}", content=make_record("a"))
    assert (await rest.post("/v1/admin/evict", json={"num_bytes": 1})).json() == {
        "freed_bytes": 1024
    }
    assert "evicted" in assert_problem(await rest.get(f"/v1/chunks/{A}"), 404, "not-found")
    assert "never_stored" in assert_problem(await rest.get(f"/v1/chunks/{B}"), 404, "not-found")


async def test_many_at_once(rest: httpx.AsyncClient) -> None:
    names = [f"chunk {i}" for i in range(11)]
    keys = [make_key(name).key.to_url() for name in names]
    for name, key in zip(names[::2], keys[::2], strict=True):
        await rest.put(f"/v1/chunks/{key}", content=make_record(name))
    present = (await rest.post("/v1/chunks:contains", json={"keys": keys})).json()
    assert present == {"present": [i % 2 == 0 for i in range(11)]}
    # A key that is repeated is answered once.
    got = await rest.post("/v1/chunks:get", json={"keys": [*keys, *keys[:4] * 1000]})
    assert got.headers["content-type"] == RECORD_TYPE
    assert got.content == b"".join(make_record(name) for name in names[::2])
    assert (await rest.post("/v1/chunks:get", json={"keys": []})).content == b""


async def test_the_list_is_paged_and_ordered(rest: httpx.AsyncClient) -> None:
    for i in range(5):
        await rest.put(f"/v1/chunks/{make_key(i).key.to_url()}", content=make_record(i))
    seen, offset = [], 0
    while offset is not None:
        page = (await rest.get("/v1/chunks", params={"offset": offset, "limit": 2})).json()
        seen += page["chunks"]
        offset = page["next_offset"]
    assert {chunk["key"] for chunk in seen} == {make_key(i).key.to_url() for i in range(5)}
    assert len(seen) == 5
    assert all(
        chunk["size_bytes"] == len(make_record(0)) and chunk["tiers"] == ["memory"]
        for chunk in seen
    )
    assert_problem(await rest.get("/v1/chunks", params={"limit": 0}), 422, "invalid")


BAD_BODIES = {
    "empty": (b"", "short"),
    "half a head": (make_record("a")[:300], "short"),
    "half a payload": (make_record("a")[:-1], "bounds"),
    "bytes after it": (make_record("a") + b"x", "bounds"),
    "another key": (make_record("b"), "wrong_key"),
    "flipped byte": (make_record("a")[:-1] + b"?", "digest"),
}


@pytest.mark.parametrize(("body", "reason"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_body_that_is_no_record_of_the_key_is_refused(
    rest: httpx.AsyncClient, parts: StorageNode, body: bytes, reason: str
) -> None:
    assert reason in assert_problem(
        await rest.put(f"/v1/chunks/{A}", content=body), 422, "bad-record"
    )
    assert not parts.stack.hot.held()
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_a_body_above_the_bound_is_refused(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    record = make_record("a", bytes(1 << 20))
    response = await rest.put(f"/v1/chunks/{A}", content=record)
    assert response.status_code == 413
    assert response.headers["content-type"] == "application/problem+json"

    async def undeclared() -> AsyncIterator[bytes]:
        for at in range(0, len(record), 1000):
            yield record[at : at + 1000]

    assert (await rest.put(f"/v1/chunks/{A}", content=undeclared())).status_code == 413
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_head_that_states_too_much_takes_no_memory(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    chunk = make_chunk("a", payload=b"")
    header = make_chunk("a", payload=bytes(100 << 20)).header
    head = encode_head(header, 100 << 20)
    assert len(head) == len(chunk.head)
    assert_problem(await rest.put(f"/v1/chunks/{A}", content=head + b"little"), 422, "bad-record")

    async def undeclared() -> AsyncIterator[bytes]:
        yield head + b"little"

    assert_problem(await rest.put(f"/v1/chunks/{A}", content=undeclared()), 413, "too-large")
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_record_that_states_more_than_can_be_decoded_from_it_is_refused(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    chunk = overstated("a")
    record = chunk.head + bytes(chunk.memory.byte_array)
    detail = assert_problem(await rest.put(f"/v1/chunks/{A}", content=record), 422, "bad-record")
    assert "encoded tensor" in detail
    assert not parts.stack.hot.held()
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_no_room_while_everything_is_referenced(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    held = parts.stack.allocate(parts.stack.hot.stats()["capacity_bytes"])
    assert held is not None
    try:
        assert_problem(await rest.put(f"/v1/chunks/{A}", content=make_record("a")), 507, "capacity")
    finally:
        held.ref_count_down()
    assert (await rest.put(f"/v1/chunks/{A}", content=make_record("a"))).status_code == 201


@pytest.mark.parametrize("key", ["zzz", "a" * 300, A[:-1]])
async def test_malformed_key_is_refused(rest: httpx.AsyncClient, key: str) -> None:
    for call in (
        rest.get(f"/v1/chunks/{key}"),
        rest.put(f"/v1/chunks/{key}", content=make_record("a")),
        rest.delete(f"/v1/chunks/{key}"),
    ):
        assert_problem(await call, 400, "bad-key")
    for path in ("chunks:contains", "chunks:get", "admin/pin"):
        assert_problem(await rest.post(f"/v1/{path}", json={"keys": [A, key]}), 400, "bad-key")


@pytest.mark.parametrize("body", [{}, {"keys": [A], "more": 1}, {"keys": [A] * 5000}])
async def test_bodies_that_are_not_valid_are_problems(
    rest: httpx.AsyncClient, body: dict[str, object]
) -> None:
    response = await rest.post("/v1/chunks:contains", json=body)
    assert_problem(response, 422, "invalid")
    assert A not in response.text, "the input is not repeated"


async def test_figures_and_metrics(rest: httpx.AsyncClient) -> None:
    await rest.put(f"/v1/chunks/{A}", content=make_record("a"))
    await rest.get(f"/v1/chunks/{A}")
    await rest.get(f"/v1/chunks/{B}")
    stats = (await rest.get("/v1/stats")).json()
    assert (stats["instance"], stats["draining"], stats["settled"]) == ("storage-0", False, True)
    assert stats["tiers"]["memory"]["num_chunks"] == 1
    text = (await rest.get("/metrics")).text
    assert 'lmcache_storage_served_chunks_total{tier="memory"} 1.0' in text
    assert 'lmcache_storage_missed_chunks_total{reason="never_stored"} 1.0' in text
    assert "lmcache_storage_stored_chunks_total 1.0" in text
    assert 'lmcache_tier_chunks{tier="memory"} 1.0' in text


NOTHING_MOVED = {
    "state": "done",
    "total": 0,
    "handed_over": 0,
    "already_elsewhere": 0,
    "failed": 0,
    "left": 0,
}


async def test_a_draining_storage_serves_and_takes_nothing(tmp_path: Path) -> None:
    async with serving(disk_path=tmp_path, disk_gb=0.01) as (rest, parts):
        assert (await rest.put(f"/v1/chunks/{A}", content=make_record("a"))).status_code == 201
        assert (await rest.get("/readyz")).status_code == 200
        assert (await rest.post("/v1/admin/drain")).json() == {
            "draining": True,
            "settled": True,
            "drain": NOTHING_MOVED,
        }
        assert_problem(await rest.put(f"/v1/chunks/{B}", content=make_record("b")), 503, "draining")
        lm = LmClient("127.0.0.1", parts.lm_server.port, None, PATIENT)
        assert await lm.put([make_chunk("b")]) == [False]
        assert await lm.contains([make_key("a"), make_key("b")]) == [True, False]
        await lm.close()
        assert (await rest.get(f"/v1/chunks/{A}")).content == make_record("a")
        ready = await rest.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["stores"]["ok"]) == (503, False)
        assert (await rest.get("/v1/stats")).json()["draining"] is True
        assert [(key.key.to_url(), tiers) for key, _, tiers in await parts.holdings("default")] == [
            (A, ["memory", "disk"])
        ]
        assert (await rest.post("/v1/admin/undrain")).json() == {
            "draining": False,
            "settled": True,
            "drain": {**NOTHING_MOVED, "state": "serving"},
        }
        assert (await rest.put(f"/v1/chunks/{B}", content=make_record("b"))).status_code == 201
        assert (await rest.get("/readyz")).status_code == 200
        parts.drain.is_last = True
        await rest.post("/v1/admin/drain")
        assert_problem(await rest.post("/v1/admin/undrain"), 409, "conflict")


async def test_listing_chunks_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (rest, _):
        assert (await rest.put(f"/v1/chunks/{A}", content=make_record("a"))).status_code == 201
        held, go_on = LocalCPUBackend.held, threading.Event()
        num_listing = 0

        def slow(self: LocalCPUBackend) -> Any:
            nonlocal num_listing
            num_listing += 1
            assert go_on.wait(60)
            return held(self)

        monkeypatch.setattr(LocalCPUBackend, "held", slow)
        asked = [asyncio.create_task(rest.get("/v1/chunks")) for _ in range(8)]
        assert (await rest.get(f"/v1/chunks/{A}")).content == make_record("a")
        assert num_listing <= 1
        go_on.set()
        assert {(await page).json()["chunks"][0]["key"] for page in asked} == {A}


async def test_a_disk_that_fails_degrades_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(disk_path=tmp_path, disk_gb=0.01) as (rest, parts):
        disk = parts.local_tiers[1]
        monkeypatch.setattr(
            type(disk), "stats", lambda self: {"is_failing": 1, "is_loading": 0, "num_chunks": 0}
        )
        ready = await rest.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        monkeypatch.undo()
        assert (await rest.get("/readyz")).json()["status"] == "ok"


async def test_a_disk_that_comes_later_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume"
    async with serving(disk_path=volume / "disk", disk_gb=0.01) as (rest, parts):
        assert (await rest.put(f"/v1/chunks/{A}", content=make_record("a"))).status_code == 201
        assert await parts.stack.drain(60)
    volume.rename(tmp_path / "elsewhere")
    volume.write_text("what is mounted there is away")
    monkeypatch.setattr("lmcache_core.storage.stack.FIRST_RETRY_S", 0.02)
    num_announced: list[int] = []
    async with serving(
        disk_path=volume / "disk", disk_gb=0.01, lookup_url="http://127.0.0.1:1"
    ) as (_, parts):
        disk = parts.local_tiers[1]
        assert isinstance(disk, DiskBackend)
        monkeypatch.setattr(
            InstanceReporter, "announce_again", lambda _: num_announced.append(len(disk.held()))
        )
        volume.unlink()
        (tmp_path / "elsewhere").rename(volume)
        await until(lambda: num_announced)
    assert num_announced == [1]
