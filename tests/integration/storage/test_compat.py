"""The listener for LMCache clients in a real cache_storage: beside its other doors, on its
tiers, over restarts.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.wire.capabilities import Accepts

from tests.fixtures.compat import ABOUT, GET, LIST, PUT, compat_client, request_bytes
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.storage_app import TOKENS, bearer, write_tokens
from tests.fixtures.wire import Arena, connected

MIB = 1 << 20
VALUE_BYTES = 700_000
NUM_CLIENTS = 16


def environ(directory: Path, **options: Any) -> dict[str, str]:
    settings = {
        "port": 0,
        "lm_port": 0,
        "memory_gb": 0.03,
        "instance_id": "storage-0",
        "max_record_mb": 2,
        "lmcache_compat_port": 0,
        "lmcache_compat_tenant": "acme",
        "auth_tokens_file": write_tokens(directory / "tokens.yaml"),
    }
    return {
        f"LMCACHE_STORAGE_{name.upper()}": str(value)
        for name, value in (settings | options).items()
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("storage")
    with running_service("lmcache_storage", directory, environ(directory)) as service:
        yield service


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ServiceProcess]:
    with running_service(
        "lmcache_storage", tmp_path, environ(tmp_path, disk_path=tmp_path / "disk", disk_gb=0.1)
    ) as service:
        yield service


def port_of(service: ServiceProcess) -> int:
    return service.ports["lmcache_compat_port"]


def value_of(name: object, num_bytes: int = VALUE_BYTES) -> bytes:
    return random.Random(str(name)).randbytes(num_bytes)


def chunk_key(name: str, tenant: str = "acme") -> ChunkKey:
    return ChunkKey.of(tenant, CacheEngineKey("lmcache-v0.3+", "", 1, 0, name))


async def settle(service: ServiceProcess) -> None:
    async with (
        httpx.AsyncClient(
            base_url=service.url, headers=bearer("operator"), trust_env=False
        ) as rest,
        asyncio.timeout(20),
    ):
        while not (await rest.get("/v1/stats")).json()["settled"]:
            await asyncio.sleep(0.02)


async def metric(service: ServiceProcess, name: str) -> dict[str, float]:
    """The samples of a counter that has counted something, by their labels."""
    async with httpx.AsyncClient(
        base_url=service.url, headers=bearer("operator"), trust_env=False
    ) as rest:
        answer = await rest.get("/metrics")
    assert answer.status_code == 200, answer.text
    samples = (
        line.removeprefix(name).rsplit(" ", 1)
        for line in answer.text.splitlines()
        if line.startswith(f"{name}{{")
    )
    return {labels: float(value) for labels, value in samples if float(value)}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_values_outlive_a_restart_on_the_disk(
    storage: ServiceProcess, end: signal.Signals
) -> None:
    async with compat_client(port_of(storage)) as client:
        for i in range(10):
            await client.put(f"k{i}", value_of(i), (*ABOUT[:5], i))
        assert await client.exists("k9")
    await settle(storage)
    storage.stop(end)
    storage.start()
    async with compat_client(port_of(storage)) as client, asyncio.timeout(60):
        while not await client.exists("k9"):
            await asyncio.sleep(0.02)
        for i in range(10):
            assert await client.get(f"k{i}") == ((*ABOUT[:5], i), value_of(i))


async def test_a_value_damaged_on_the_disk_is_missing(
    storage: ServiceProcess, tmp_path: Path
) -> None:
    async with compat_client(port_of(storage)) as client:
        await client.put("k", value_of("k"))
        assert await client.exists("k")
    await settle(storage)
    storage.stop()
    [path] = (tmp_path / "disk").rglob("*.kvr")
    data = bytearray(path.read_bytes())
    data[-VALUE_BYTES // 2] ^= 1
    path.write_bytes(data)
    storage.start()
    async with compat_client(port_of(storage)) as client:
        assert await client.get("k") is None
        await client.put("k", value_of("again"))
        assert await client.get("k") == (ABOUT, value_of("again"))


async def test_our_own_engines_never_load_such_a_value(shared: ServiceProcess) -> None:
    """Even one that asks for it by its name, with the right token, and takes what is lossy."""
    arena = Arena()
    async with compat_client(port_of(shared)) as client:
        await client.put("k", value_of("k"))
        assert await client.exists("k")
    url = f"lm://127.0.0.1:{shared.ports['lm_port']}"
    for lossy in (True, False):
        remote = create_remote_backend(url, TOKENS["acme"], timeout_s=20, accepts=Accepts(lossy))
        engine_side = EncodedBackend(remote, create_codecs({}), accepts_lossy=lossy)
        await engine_side.open()
        [result] = await engine_side.batched_get([chunk_key("k")], arena)
        assert isinstance(result, Miss)
        assert result.reason == MissReason.ENCODING or not lossy
        await engine_side.close()
    arena.check_empty()


async def test_many_clients_at_once_and_bad_ones_among_them(shared: ServiceProcess) -> None:
    """More is written than memory holds; whatever comes back is right, and every connection is
    served to its end.
    """

    async def work(number: int) -> None:
        dice = random.Random(number)
        async with compat_client(port_of(shared)) as client:
            for _ in range(12):
                name = f"k{dice.randrange(60)}"
                if dice.random() < 0.5:
                    await client.put(name, value_of(name))
                else:
                    assert await client.get(name) in (None, (ABOUT, value_of(name)))

    async def misbehave(number: int) -> None:
        async with connected(port_of(shared)) as raw:
            match number % 4:
                case 0:
                    await raw.send(request_bytes("v0.3+", LIST, "k"))
                    assert await raw.is_closed()
                case 1:
                    await raw.send(request_bytes("v0.3+", PUT, "k", 2 * MIB))
                    assert await raw.is_closed()
                case 2:
                    await raw.send(
                        request_bytes("v0.3+", PUT, "k1", VALUE_BYTES), bytes(VALUE_BYTES // 2)
                    )
                case _:
                    await raw.send(request_bytes("v0.3+", GET, "k")[:50])

    before = await metric(shared, "lmcache_storage_compat_requests_total")
    clients = [
        asyncio.create_task(do(i), name=f"{do.__name__} {i}")
        for do in (work, misbehave)
        for i in range(NUM_CLIENTS)
    ]
    closed: dict[str, float] = {}
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*clients)
            while (
                sum(
                    (closed := await metric(shared, "lmcache_storage_compat_closed_total")).values()
                )
                < NUM_CLIENTS
            ):
                await asyncio.sleep(0.1)
    except TimeoutError:
        stuck = [client.get_name() for client in clients if client.cancelled()]
        pytest.fail(
            f"not served to their end: {stuck}; closed: {closed}; the service says:"
            f" {shared.output[-2000:]}"
        )
    each = NUM_CLIENTS / 4
    assert closed == {
        '{reason="command"}': each,
        '{reason="length"}': each,
        '{reason="short"}': 2 * each,
    }
    requests = await metric(shared, "lmcache_storage_compat_requests_total")
    num_requests = sum(
        requests.get(label, 0) - before.get(label, 0)
        for label in ('{command="put"}', '{command="get"}')
    )
    assert num_requests == 12 * NUM_CLIENTS + each
    assert not await metric(shared, "lmcache_storage_compat_unservable_values_total")
