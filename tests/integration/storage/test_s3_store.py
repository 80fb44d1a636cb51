"""cache_storage as a process over a real S3-compatible bucket: killed, paused, slow, read-only; and
over one that states impossible lengths.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_core.record import MissReason

from tests.chaos.cluster.link import Link
from tests.fixtures.raw_server import Reply, running_raw_server
from tests.fixtures.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, running_s3
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.storage_process import allocator, clients_of, running_storage, until_settled
from tests.fixtures.waiting import until, wait_until
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

CHUNK_BYTES = 100_000
MEMORY_GB = 0.03
S3 = "bucket"


def options_of(directory: Path, server: S3Server) -> dict[str, Any]:
    return {
        "memory_gb": MEMORY_GB,
        "disk_path": directory / "disk",
        "disk_gb": 0.05,
        "tier_timeout_s": 30,
        "s3_timeout_s": 30,
        **server.options,
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with running_s3(tmp_path) as server:
        yield server


@pytest.fixture
def storage(tmp_path: Path, server: S3Server) -> Iterator[ServiceProcess]:
    with running_storage(tmp_path, **options_of(tmp_path, server)) as service:
        yield service
        for secret in (ACCESS_KEY, SECRET_KEY, "Traceback"):
            assert secret not in service.output


def url_of(name: str) -> str:
    return f"/v1/chunks/{make_key(name).key.to_url()}"


def record_of(name: str) -> bytes:
    return make_record(name, make_payload(name, CHUNK_BYTES))


async def figures(rest: httpx.AsyncClient) -> dict[str, int]:
    return dict((await rest.get("/v1/stats")).json()["tiers"][S3])


async def store(rest: httpx.AsyncClient, *names: str) -> None:
    """Store them, and wait until they are where they go."""
    for name in names:
        assert (await rest.put(url_of(name), content=record_of(name))).status_code in (201, 204)
    await until_settled(rest)


def start_empty(storage: ServiceProcess, directory: Path) -> None:
    """Kill it and start it again with empty memory and disk."""
    storage.stop(signal.SIGKILL)
    shutil.rmtree(directory / "disk")
    storage.start()


async def leave_in_bucket(storage: ServiceProcess, directory: Path, *names: str) -> None:
    """Store chunks that only the bucket holds afterwards."""
    async with clients_of(storage) as (rest, _):
        await store(rest, *names)
    await asyncio.to_thread(start_empty, storage, directory)


async def test_chunks_lost_by_memory_and_disk_come_from_the_bucket(
    storage: ServiceProcess, server: S3Server, tmp_path: Path
) -> None:
    async with clients_of(storage) as (rest, lm):
        await lm.put([make_chunk("b", payload=make_payload("b", CHUNK_BYTES))])
        await store(rest, "a", "c")
    assert len(server.names()) == 3
    start_empty(storage, tmp_path)
    async with clients_of(storage) as (rest, lm):
        assert await lm.contains([make_key(name) for name in ("a", "b", "never", "c")]) == [
            True,
            True,
            False,
            True,
        ]
        assert (await rest.get(url_of("a"))).content == record_of("a")
        results = await lm.get([make_key("b"), make_key("never")], allocator(10 * CHUNK_BYTES))
        assert [payload_of(result) for result in results] == [
            make_payload("b", CHUNK_BYTES),
            MissReason.NEVER_STORED,
        ]
        served = await figures(rest)
        assert (served["served_chunks"], served["get_calls"] > 0) == (2, True)
        metrics = (await rest.get("/metrics")).text
        label = '{operation="get",tier="bucket"} '
        assert (
            float(metrics.partition("lmcache_tier_seconds_total" + label)[2].partition("\n")[0]) > 0
        )
        assert f"lmcache_tier_bytes_total{label}{float(2 * len(record_of('a')))}" in metrics
        assert SECRET_KEY not in metrics
        assert (await rest.get(url_of("a"))).content == record_of("a")
        assert (await figures(rest))["served_chunks"] == 2, "it is hot now"
        assert (await rest.delete(url_of("a"))).status_code == 204
        assert (await rest.get(url_of("a"))).status_code == 404
        assert await lm.remove([make_key("c")]) == 1
        assert len(server.names()) == 1


async def test_a_killed_bucket_is_bypassed_until_it_is_back(
    storage: ServiceProcess, server: S3Server, tmp_path: Path
) -> None:
    await leave_in_bucket(storage, tmp_path, "a", "b")
    async with clients_of(storage) as (rest, lm):
        server.pause()
        asked = asyncio.ensure_future(
            lm.get([make_key("a"), make_key("b")], allocator(10 * CHUNK_BYTES))
        )
        await rest.get("/healthz")
        server.kill()
        results = [payload_of(result) for result in await asked]
        assert set(results) == {MissReason.UNAVAILABLE}
        for i in range(8):
            assert (await rest.put(url_of(f"{i}"), content=record_of(f"{i}"))).status_code == 201
            assert (await rest.get(url_of("a"))).status_code == 404

        async def is_bypassed() -> bool:
            await rest.get(url_of("a"))
            return bool((await figures(rest))["breaker_open"])

        await until(is_bypassed)
        ready = (await rest.get("/readyz")).json()
        assert (ready["status"], ready["checks"]["s3"]["ok"]) == ("degraded", False)
        assert (await rest.get(url_of("3"))).content == record_of("3")
        server.start()

        async def is_found() -> bool:
            return (await rest.get(url_of("a"))).status_code == 200

        await until(is_found)
        assert (await rest.get(url_of("a"))).content == record_of("a")
        assert (await rest.get("/readyz")).json()["status"] == "ok"
        await store(rest, "after")
        assert (await figures(rest))["stored_chunks"] >= 1


async def test_a_slow_bucket_costs_reads_their_deadline_and_stores_nothing(
    server: S3Server, tmp_path: Path
) -> None:
    link = Link(0)
    await link.open()
    link.set_target("s3", int(server.url.rpartition(":")[2]))
    url = f"http://127.0.0.1:{link.port}"
    slow = {"s3_endpoint_url": url, "tier_timeout_s": 1}
    try:
        with running_storage(tmp_path, **options_of(tmp_path, server) | slow) as storage:
            await leave_in_bucket(storage, tmp_path, "a")
            async with clients_of(storage) as (rest, lm):
                link.delay_s = 600.0
                [result] = await lm.get([make_key("a")], allocator(10 * CHUNK_BYTES))
                assert payload_of(result) is MissReason.DEADLINE
                num_bytes = int(MEMORY_GB * 2**30)
                for i in range(80):  # Twice as many as may wait in memory.
                    answer = await rest.put(url_of(f"{i}"), content=record_of(f"{i}"))
                    assert answer.status_code == 201
                    if i % 20 == 0:
                        assert (await figures(rest))["pending_write_bytes"] <= num_bytes // 8
                assert (await figures(rest))["dropped_writes"] == 0, "the rest waits by name"
            # An orderly end would wait for the writes.
            await asyncio.to_thread(storage.stop, signal.SIGKILL)
    finally:
        await link.close()


async def test_a_read_only_bucket_is_still_read(
    storage: ServiceProcess, server: S3Server, tmp_path: Path
) -> None:
    await leave_in_bucket(storage, tmp_path, "a")
    server.kill()
    server.is_read_only = True
    server.start()
    async with clients_of(storage) as (rest, _):
        for i in range(8):
            await store(rest, f"{i}")
        refused = await figures(rest)
        assert refused["failed_writes"] + refused["rejected_writes"] == 8
        assert refused["rejected_writes"] > 0, "a bucket that has refused is not asked each time"
        assert (refused["failed_writes"] > 0, refused["is_failing"], refused["breaker_open"]) == (
            True,
            1,
            0,
        )
        assert (await rest.get(url_of("a"))).content == record_of("a")
        assert not (await rest.get("/readyz")).json()["checks"]["s3"]["ok"]
        server.kill()
        server.is_read_only = False
        server.start()

        numbers = itertools.count()

        async def is_healed() -> bool:
            await store(rest, f"later-{next(numbers)}")
            return not (await figures(rest))["is_failing"]

        await until(is_healed)
        assert (await rest.get("/readyz")).json()["checks"]["s3"]["ok"]


async def test_refused_credentials_are_an_unavailable_tier_until_they_are_replaced(
    storage: ServiceProcess, server: S3Server, tmp_path: Path
) -> None:
    await leave_in_bucket(storage, tmp_path, "a")
    server.kill()
    server.secret_key = "another-secret-0123456789"
    server.start()
    async with clients_of(storage) as (rest, _):
        assert (await rest.get(url_of("a"))).status_code == 404
        ready = await rest.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["s3"]["ok"]) == (200, False)
        assert SECRET_KEY not in ready.text
        assert (await rest.put(url_of("b"), content=record_of("b"))).status_code == 201
        server.secret_key_file.write_text(server.secret_key)

        async def is_found() -> bool:
            return (await rest.get(url_of("a"))).status_code == 200

        await until(is_found)
    assert server.secret_key not in storage.output


STATED_BYTES = 100_000_000_000


def stating(status: int) -> Reply:
    """An answer of that status which begins a body of `STATED_BYTES`; no chunk is there."""

    def reply(method: str, path: str) -> Iterable[bytes]:
        now = 404 if method == "HEAD" else status
        yield f"HTTP/1.1 {now} Whatever\r\ncontent-length: {STATED_BYTES}\r\n\r\n".encode()
        for _ in range(4):
            yield b"<Error>" + b"x" * 4096

    return reply


@pytest.mark.parametrize("status", [200, 503])
def test_a_length_that_the_bucket_states_costs_a_failed_call_and_no_process(
    tmp_path: Path, status: int
) -> None:
    keys = tmp_path / "key"
    keys.write_text("key-of-tests")
    options = {"s3_bucket": "kv", "s3_access_key_file": keys, "s3_secret_key_file": keys}
    limits = {"tier_timeout_s": 1, "s3_timeout_s": 2}
    url, other = url_of("a"), url_of("b")
    record = make_record("a", make_payload("a", 10_000))
    with (
        running_raw_server() as bucket,
        running_storage(tmp_path, **options, **limits, s3_endpoint_url=bucket.url) as storage,
        httpx.Client(base_url=storage.url, trust_env=False, timeout=60) as rest,
    ):
        bucket.reply = stating(status)
        assert rest.get(other).status_code == 404
        assert rest.put(url, content=record).status_code == 201
        wait_until(lambda: rest.get("/v1/stats").json()["settled"])
        assert rest.delete(url).status_code == 204
        assert rest.get(other).status_code == 404
        assert rest.get("/readyz").status_code == 200
        assert rest.put(url, content=record).status_code in (201, 204)
        assert rest.get(url).content == record
        assert {method for method, _ in bucket.asked} >= {"PUT", "GET"}, "the bucket was asked"
        assert storage.stop(signal.SIGTERM) == 0
