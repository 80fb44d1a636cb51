"""cache_storage as a process: both doors, restarts, SIGKILL, clients that vanish."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.storage_process import allocator, clients_of, running_storage, until_settled
from tests.fixtures.waiting import until
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

LARGE_BYTES = 3_000_001
A, B = make_key("a").key.to_url(), make_key("b").key.to_url()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ServiceProcess]:
    with running_storage(tmp_path, disk_path=tmp_path / "disk", disk_gb=0.05) as service:
        yield service


@pytest.mark.parametrize("num_bytes", [0, LARGE_BYTES])
async def test_rest_and_lm_serve_the_same_bytes(storage: ServiceProcess, num_bytes: int) -> None:
    payload = make_payload("x", num_bytes)
    async with clients_of(storage) as (rest, lm):
        assert (
            await rest.put(f"/v1/chunks/{A}", content=make_record("a", payload))
        ).status_code == 201
        assert await lm.put([make_chunk("b", payload=payload)]) == [True]
        assert await lm.contains([make_key("a"), make_key("b"), make_key("c")]) == [
            True,
            True,
            False,
        ]
        results = await lm.get([make_key("a"), make_key("b")], allocator(3 * LARGE_BYTES))
        assert [payload_of(result) for result in results] == [payload, payload]
        assert (await rest.get(f"/v1/chunks/{B}")).content == make_record("b", payload)
        assert await lm.remove([make_key("a")]) == 1
        assert (await rest.get(f"/v1/chunks/{A}")).status_code == 404


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restarted_storage_serves_its_disk(
    storage: ServiceProcess, end: signal.Signals
) -> None:
    async with clients_of(storage) as (rest, _):
        for name in ("a", "b"):
            await rest.put(
                f"/v1/chunks/{make_key(name).key.to_url()}",
                content=make_record(name, make_payload(name, 100_000)),
            )
        if end is signal.SIGKILL:
            await until_settled(rest)
    assert storage.stop(end) == (0 if end is signal.SIGTERM else -signal.SIGKILL)
    storage.start()
    async with clients_of(storage) as (rest, lm):
        for name in ("a", "b"):
            got = await rest.get(f"/v1/chunks/{make_key(name).key.to_url()}")
            assert got.content == make_record(name, make_payload(name, 100_000))
        stats = await until_settled(rest)
        assert stats["tiers"]["disk"]["damaged_at_start"] == 0
        assert await lm.contains([make_key("a"), make_key("b")]) == [True, True]


def send_part(port: int, key: str, record: bytes, num_bytes: int) -> socket.socket:
    """Begin a PUT of a record and stop in the middle of it."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(
        f"PUT /v1/chunks/{key} HTTP/1.1\r\nHost: storage\r\nContent-Length: {len(record)}\r\n\r\n".encode()  # noqa: E501
    )
    connection.sendall(record[:num_bytes])
    return connection


async def test_sigkill_during_a_put_leaves_nothing_of_it(storage: ServiceProcess) -> None:
    record = make_record("b", make_payload("b", LARGE_BYTES))
    async with clients_of(storage) as (rest, _):
        await rest.put(f"/v1/chunks/{A}", content=make_record("a"))
        await until_settled(rest)
        with send_part(storage.ports["port"], B, record, LARGE_BYTES // 2):
            await until(lambda: takes_memory(rest, LARGE_BYTES))
            storage.stop(signal.SIGKILL)
    storage.start()
    async with clients_of(storage) as (rest, _):
        assert (await rest.get(f"/v1/chunks/{A}")).content == make_record("a")
        assert (await rest.get(f"/v1/chunks/{B}")).status_code == 404
        assert (await rest.put(f"/v1/chunks/{B}", content=record)).status_code == 201
        assert (await rest.get(f"/v1/chunks/{B}")).content == record


async def takes_memory(rest: httpx.AsyncClient, at_least: int) -> bool:
    stats = (await rest.get("/v1/stats")).json()
    return bool(stats["tiers"]["memory"]["arena_used_bytes"] >= at_least)


async def is_free(rest: httpx.AsyncClient) -> bool:
    hot = (await rest.get("/v1/stats")).json()["tiers"]["memory"]
    return bool(hot["arena_used_bytes"] == hot["used_bytes"])


async def test_clients_that_vanish_leave_no_trace(storage: ServiceProcess) -> None:
    record = make_record("a", make_payload("a", LARGE_BYTES))
    async with clients_of(storage) as (rest, _):
        with send_part(storage.ports["port"], A, record, LARGE_BYTES // 2):
            await until(lambda: takes_memory(rest, LARGE_BYTES))
        await until(lambda: is_free(rest))
        assert (await rest.get(f"/v1/chunks/{A}")).status_code == 404
        await rest.put(f"/v1/chunks/{A}", content=record)
        for path, method, body in (
            ("/v1/chunks/" + A, "GET", ""),
            ("/v1/chunks:get", "POST", f'{{"keys": ["{A}", "{A}"]}}'),
        ):
            with socket.create_connection(("127.0.0.1", storage.ports["port"])) as reader:
                head = (
                    f"{method} {path} HTTP/1.1\r\nHost: storage\r\nContent-Type:"
                    f" application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                reader.sendall((head + body).encode())
                assert reader.recv(1000).startswith(b"HTTP/1.1 200")
            await until(lambda: is_evictable(rest))
            await rest.put(f"/v1/chunks/{A}", content=record)
    assert "Traceback" not in storage.output


async def is_evictable(rest: httpx.AsyncClient) -> bool:
    """Return whether the chunk had no reader left; it is then gone from memory."""
    answer = await rest.post("/v1/admin/evict", json={"num_bytes": 1})
    return bool(answer.json()["freed_bytes"])


def test_a_second_process_on_the_same_disk_does_not_start(
    storage: ServiceProcess, tmp_path: Path
) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "lmcache_storage"],
        env=storage.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode != 0
    assert "in use by another process" in second.stderr
