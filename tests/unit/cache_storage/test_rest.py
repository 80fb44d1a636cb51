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

from tests.fixtures.storage_app import assert_problem, bearer, serving, write_tokens
from tests.fixtures.waiting import until
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record, overstated

A, B = make_key("a").key.to_url(), make_key("b").key.to_url()
A_URL, B_URL = f"/v1/chunks/{A}", f"/v1/chunks/{B}"
PATIENT = ClientOptions(timeout_s=60.0, connect_timeout_s=60.0)
RECORD_TYPE = "application/vnd.lmcache.record"


async def store(
    rest: httpx.AsyncClient, *names: object, tenant: str = "", num_bytes: int = 1000
) -> None:
    for name in names:
        record = make_record(name, make_payload(name, num_bytes))
        url = f"/v1/chunks/{make_key(name).key.to_url()}"
        headers = bearer(tenant) if tenant else None
        assert (await rest.put(url, content=record, headers=headers)).status_code == 201


async def present(rest: httpx.AsyncClient, *names: object, tenant: str = "") -> list[bool]:
    keys = {"keys": [make_key(name).key.to_url() for name in names]}
    headers = bearer(tenant) if tenant else None
    found: list[bool] = (await rest.post("/v1/chunks:contains", json=keys, headers=headers)).json()[
        "present"
    ]
    return found


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
    assert (await rest.put(A_URL, content=record)).status_code == 201
    assert (await rest.put(A_URL, content=record)).status_code == 204
    got = await rest.get(A_URL)
    assert (got.status_code, got.content) == (200, record)
    assert got.headers["content-type"] == RECORD_TYPE
    assert (await rest.head(A_URL)).status_code == 200
    assert (await rest.delete(A_URL)).status_code == 204
    for method in ("get", "delete"):
        assert_problem(await getattr(rest, method)(A_URL), 404, "not-found")
    assert (await rest.head(A_URL)).status_code == 404


async def test_miss_has_a_reason(rest: httpx.AsyncClient, parts: StorageNode) -> None:
    await store(rest, "a")
    assert (await rest.post("/v1/admin/evict", json={"num_bytes": 1})).json() == {
        "freed_bytes": 1024
    }
    assert "evicted" in assert_problem(await rest.get(A_URL), 404, "not-found")
    assert "never_stored" in assert_problem(await rest.get(B_URL), 404, "not-found")


async def test_many_at_once(rest: httpx.AsyncClient) -> None:
    names = [f"chunk {i}" for i in range(11)]
    keys = [make_key(name).key.to_url() for name in names]
    await store(rest, *names[::2])
    assert await present(rest, *names) == [i % 2 == 0 for i in range(11)]
    # A key that is repeated is answered once.
    got = await rest.post("/v1/chunks:get", json={"keys": [*keys, *keys[:4] * 1000]})
    assert got.headers["content-type"] == RECORD_TYPE
    assert got.content == b"".join(make_record(name) for name in names[::2])
    assert (await rest.post("/v1/chunks:get", json={"keys": []})).content == b""


async def test_the_list_is_paged_and_ordered(rest: httpx.AsyncClient) -> None:
    await store(rest, *range(5))
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
    assert reason in assert_problem(await rest.put(A_URL, content=body), 422, "bad-record")
    assert not parts.stack.hot.held()
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_a_body_above_the_bound_is_refused(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    record = make_record("a", bytes(1 << 20))
    response = await rest.put(A_URL, content=record)
    assert response.status_code == 413
    assert response.headers["content-type"] == "application/problem+json"

    async def undeclared() -> AsyncIterator[bytes]:
        for at in range(0, len(record), 1000):
            yield record[at : at + 1000]

    assert (await rest.put(A_URL, content=undeclared())).status_code == 413
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_head_that_states_too_much_takes_no_memory(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    chunk = make_chunk("a", payload=b"")
    header = make_chunk("a", payload=bytes(100 << 20)).header
    head = encode_head(header, 100 << 20)
    assert len(head) == len(chunk.head)
    assert_problem(await rest.put(A_URL, content=head + b"little"), 422, "bad-record")

    async def undeclared() -> AsyncIterator[bytes]:
        yield head + b"little"

    assert_problem(await rest.put(A_URL, content=undeclared()), 413, "too-large")
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_record_that_states_more_than_can_be_decoded_from_it_is_refused(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    chunk = overstated("a")
    record = chunk.head + bytes(chunk.memory.byte_array)
    detail = assert_problem(await rest.put(A_URL, content=record), 422, "bad-record")
    assert "encoded tensor" in detail
    assert not parts.stack.hot.held()
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0


async def test_no_room_while_everything_is_referenced(
    rest: httpx.AsyncClient, parts: StorageNode
) -> None:
    held = parts.stack.allocate(parts.stack.hot.stats()["capacity_bytes"])
    assert held is not None
    try:
        assert_problem(await rest.put(A_URL, content=make_record("a")), 507, "capacity")
    finally:
        held.ref_count_down()
    await store(rest, "a")


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
    await store(rest, "a")
    await rest.get(A_URL)
    await rest.get(B_URL)
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
        await store(rest, "a")
        assert (await rest.get("/readyz")).status_code == 200
        assert (await rest.post("/v1/admin/drain")).json() == {
            "draining": True,
            "settled": True,
            "drain": NOTHING_MOVED,
        }
        assert_problem(await rest.put(B_URL, content=make_record("b")), 503, "draining")
        lm = LmClient("127.0.0.1", parts.lm_server.port, None, PATIENT)
        assert await lm.put([make_chunk("b")]) == [False]
        assert await lm.contains([make_key("a"), make_key("b")]) == [True, False]
        await lm.close()
        assert (await rest.get(A_URL)).content == make_record("a")
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
        await store(rest, "b")
        assert (await rest.get("/readyz")).status_code == 200
        parts.drain.is_last = True
        await rest.post("/v1/admin/drain")
        assert_problem(await rest.post("/v1/admin/undrain"), 409, "conflict")


async def test_listing_chunks_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (rest, _):
        await store(rest, "a")
        held, go_on = LocalCPUBackend.held, threading.Event()
        num_listing = 0

        def slow(self: LocalCPUBackend) -> Any:
            nonlocal num_listing
            num_listing += 1
            assert go_on.wait(60)
            return held(self)

        monkeypatch.setattr(LocalCPUBackend, "held", slow)
        asked = [asyncio.create_task(rest.get("/v1/chunks")) for _ in range(8)]
        assert (await rest.get(A_URL)).content == make_record("a")
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
        await store(rest, "a")
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


LOSSY, PLAIN = make_chunk("lossy", lossy=True), make_chunk("plain")


@pytest.mark.parametrize(
    ("accepted", "serves_lossy"),
    [
        (None, True),
        ("everything, later-word", True),
        ("LOSSLESS", False),
        ("later-word, lossless", False),
    ],
)
async def test_lossy_chunk_is_a_miss_for_a_client_that_accepts_lossless_ones(
    rest: httpx.AsyncClient, accepted: str | None, serves_lossy: bool
) -> None:
    bodies = [chunk.head + bytes(chunk.memory.byte_array) for chunk in (LOSSY, PLAIN)]
    keys = [chunk.key.key.to_url() for chunk in (LOSSY, PLAIN)]
    headers = None if accepted is None else {"LMCache-Accept": accepted}
    for key, body in zip(keys, bodies, strict=True):
        await rest.put(f"/v1/chunks/{key}", content=body)
    both = await rest.post("/v1/chunks:get", json={"keys": keys}, headers=headers)
    one = await rest.get(f"/v1/chunks/{keys[0]}", headers=headers)
    head = await rest.head(f"/v1/chunks/{keys[0]}", headers=headers)
    if serves_lossy:
        assert (one.content, both.content, head.status_code) == (bodies[0], b"".join(bodies), 200)
    else:
        assert "encoding" in assert_problem(one, 404, "not-found")
        assert (both.content, head.status_code) == (bodies[1], 404)
        assert (await rest.head(f"/v1/chunks/{keys[0]}")).status_code == 200


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A storage of several tenants."""
    async with serving(auth_tokens_file=write_tokens(tmp_path / "tokens.yaml")) as (rest, _):
        yield rest


async def test_clear_names_tenants(shared: httpx.AsyncClient) -> None:
    tenants = ("acme", "rival", "operator")

    async def left_by(body: dict[str, object] | None) -> list[bool]:
        cleared = await shared.post("/v1/admin/clear", json=body, headers=bearer("operator"))
        assert cleared.status_code == 200
        return [(await present(shared, "a", tenant=tenant))[0] for tenant in tenants]

    for tenant in tenants:
        await store(shared, "a", tenant=tenant)
    assert await left_by(None) == [True, True, False]
    assert await left_by({"tenant": "acme"}) == [False, True, False]
    for tenant in ("acme", "operator"):
        await store(shared, "a", tenant=tenant)
    assert await left_by({"all_tenants": True}) == [False, False, False]
    both = await shared.post(
        "/v1/admin/clear", json={"tenant": "acme", "all_tenants": True}, headers=bearer("operator")
    )
    assert_problem(both, 422, "invalid")


async def test_pinned_chunks_are_listed_and_not_evicted() -> None:
    urls, num_bytes = [make_key(name).key.to_url() for name in "abc"], 500_000
    never = make_key("never").key.to_url()
    async with serving(eviction_policy="lru") as (rest, _):  # half of 4 MiB may be pinned
        await store(rest, *"abc", num_bytes=num_bytes)
        answer = (await rest.post("/v1/admin/pin", json={"keys": [*urls[:2], never]})).json()
        assert answer["num_pinned"] == 2
        assert answer["not_pinned"] == [{"key": never, "reason": "never_stored"}]
        assert 2 * num_bytes <= answer["pinned_bytes"] <= answer["max_pinned_bytes"]
        await store(rest, *range(20), num_bytes=num_bytes)
        assert await present(rest, *"abc") == [True, True, False]
        pins = (await rest.get("/v1/admin/pins")).json()["pins"]
        assert [(pin["key"], pin["tenant"]) for pin in pins] == [
            (url, "default") for url in urls[:2]
        ]
        unpinned = await rest.post("/v1/admin/unpin", json={"keys": urls})
        assert unpinned.json() == {"num_unpinned": 2}


async def test_admins_pin_chunks_of_a_tenant(shared: httpx.AsyncClient) -> None:
    await store(shared, "a", tenant="acme")

    async def ask(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = await shared.post(f"/v1/admin/{path}", json=body, headers=bearer("operator"))
        return dict(answer.json())

    assert (await ask("pin", {"keys": [A]}))["num_pinned"] == 0
    assert (await ask("pin", {"keys": [A], "tenant": "acme"}))["num_pinned"] == 1
    assert await ask("unpin") == {"num_unpinned": 0}
    assert await ask("unpin", {"tenant": "acme"}) == {"num_unpinned": 1}


async def test_a_tenant_has_its_quota_in_memory_and_on_disk(tmp_path: Path) -> None:
    block_gb = 4096 / (1 << 30)
    options = {
        "auth_tokens_file": write_tokens(tmp_path / "tokens.yaml"),
        "disk_path": tmp_path / "disk",
        "disk_gb": 0.01,
        "tenant_quota_gb": 0.5 * block_gb,
        "tenant_disk_quota_gb": 4 * block_gb,
        "tenant_quotas": {"rival": {"memory_gb": 1, "disk_gb": 1}},
    }
    async with serving(**options) as (rest, parts):
        await store(rest, *range(10), tenant="rival")
        for name in range(10):
            await store(rest, name, tenant="acme")
            # What waits for the disk is in use, and a tenant gives up no chunk that is.
            assert await parts.stack.drain(60)
        assert sum(await present(rest, *range(10), tenant="acme")) == 4
        assert sum(await present(rest, *range(10), tenant="rival")) == 10
        assert [parts.stack.hot.clear_now(tenant) for tenant in ("acme", "rival")] == [2, 10]


async def test_chunk_expires_in_memory_and_on_disk(tmp_path: Path) -> None:
    options = {"disk_path": tmp_path / "disk", "disk_gb": 0.01, "chunk_ttl_s": 0.2}
    async with serving(**options) as (rest, _):

        async def both_have_expired() -> bool:
            """One that expires before it is written to the disk counts in memory only."""
            await rest.put(A_URL, content=make_record("a"))
            lines = (await rest.get("/metrics")).text.splitlines()
            expired = [line for line in lines if "expired_chunks" in line and line[-4:] != " 0.0"]
            return all(f'tier="{tier}"' in str(expired) for tier in ("memory", "disk"))

        async def is_a_miss() -> bool:
            answer = await rest.get(A_URL)
            return answer.status_code == 404 and "expired" in answer.text

        await until(both_have_expired)
        await until(is_a_miss)
        await until(lambda: not list((tmp_path / "disk").rglob("*.kvr")))
