"""The listener for LMCache clients in a real cache_storage: over restarts, and with bad clients."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.wire.capabilities import Accepts

from tests.fixtures.compat import ABOUT, GET, LIST, PUT, compat_client, request_bytes
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.storage_app import TOKENS, bearer, write_tokens
from tests.fixtures.storage_process import running_storage, until_settled
from tests.fixtures.waiting import until
from tests.fixtures.wire import Arena, connected

MIB = 1 << 20
VALUE_BYTES = 700_000
NUM_CLIENTS = 16


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ServiceProcess]:
    with running_storage(
        tmp_path,
        disk_path=tmp_path / "disk",
        disk_gb=0.1,
        max_record_mb=2,
        lmcache_compat_port=0,
        lmcache_compat_tenant="acme",
        auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"),
    ) as service:
        yield service


def port_of(service: ServiceProcess) -> int:
    return service.ports["lmcache_compat_port"]


def value_of(name: object, num_bytes: int = VALUE_BYTES) -> bytes:
    return random.Random(str(name)).randbytes(num_bytes)


def chunk_key(name: str, tenant: str = "acme") -> ChunkKey:
    return ChunkKey.of(tenant, CacheEngineKey("lmcache-v0.3+", "", 1, 0, name))


async def test_values_on_the_disk_outlive_a_kill(storage: ServiceProcess) -> None:
    async with compat_client(port_of(storage)) as client:
        for i in range(10):
            await client.put(f"k{i}", value_of(i), (*ABOUT[:5], i))
        assert await client.exists("k9")
    async with httpx.AsyncClient(base_url=storage.url, trust_env=False) as rest:
        await until_settled(rest, headers=bearer("operator"))
    storage.stop(signal.SIGKILL)
    storage.start()
    async with compat_client(port_of(storage)) as client:
        await until(lambda: client.exists("k9"))
        for i in range(10):
            assert await client.get(f"k{i}") == ((*ABOUT[:5], i), value_of(i))


async def test_engines_never_load_values_of_lmcache_clients(storage: ServiceProcess) -> None:
    arena = Arena()
    async with compat_client(port_of(storage)) as client:
        await client.put("k", value_of("k"))
        assert await client.exists("k")
    url = f"lm://127.0.0.1:{storage.ports['lm_port']}"
    for lossy in (True, False):
        remote = create_remote_backend(url, TOKENS["acme"], timeout_s=20, accepts=Accepts(lossy))
        engine_side = EncodedBackend(remote, create_codecs({}), accepts_lossy=lossy)
        await engine_side.open()
        [result] = await engine_side.batched_get([chunk_key("k")], arena)
        assert isinstance(result, Miss)
        assert result.reason == MissReason.ENCODING or not lossy
        await engine_side.close()
    arena.check_empty()


async def count_closed(storage: ServiceProcess) -> dict[str, float]:
    """How many connections it closed, by their reasons."""
    name = "lmcache_storage_compat_closed_total"
    async with httpx.AsyncClient(
        base_url=storage.url, headers=bearer("operator"), trust_env=False
    ) as rest:
        text = (await rest.get("/metrics")).text
    samples = (
        line.removeprefix(name).rsplit(" ", 1)
        for line in text.splitlines()
        if line.startswith(f"{name}{{")
    )
    return {labels: float(value) for labels, value in samples if float(value)}


async def test_many_clients_at_once_and_bad_ones_among_them(storage: ServiceProcess) -> None:
    """More is written than memory holds; whatever comes back is right."""

    async def work(number: int) -> None:
        dice = random.Random(number)
        async with compat_client(port_of(storage)) as client:
            for _ in range(12):
                name = f"k{dice.randrange(60)}"
                if dice.random() < 0.5:
                    await client.put(name, value_of(name))
                else:
                    assert await client.get(name) in (None, (ABOUT, value_of(name)))

    async def misbehave(number: int) -> None:
        async with connected(port_of(storage)) as raw:
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

    await asyncio.gather(*(do(i) for do in (work, misbehave) for i in range(NUM_CLIENTS)))
    each = NUM_CLIENTS / 4
    expected = {'{reason="command"}': each, '{reason="length"}': each, '{reason="short"}': 2 * each}

    async def are_all_closed() -> bool:
        return await count_closed(storage) == expected

    await until(are_all_closed)
