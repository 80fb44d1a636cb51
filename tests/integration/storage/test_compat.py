"""The listener for LMCache clients in a real cache_storage, over restarts."""

from __future__ import annotations

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

from tests.fixtures.compat import ABOUT, compat_client
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.storage_app import TOKENS, bearer, write_tokens
from tests.fixtures.waiting import until
from tests.fixtures.wire import Arena

VALUE_BYTES = 700_000


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
    async with httpx.AsyncClient(
        base_url=service.url, headers=bearer("operator"), trust_env=False
    ) as rest:

        async def is_settled() -> bool:
            return bool((await rest.get("/v1/stats")).json()["settled"])

        await until(is_settled)


async def test_values_on_the_disk_outlive_a_kill(storage: ServiceProcess) -> None:
    async with compat_client(port_of(storage)) as client:
        for i in range(10):
            await client.put(f"k{i}", value_of(i), (*ABOUT[:5], i))
        assert await client.exists("k9")
    await settle(storage)
    storage.stop(signal.SIGKILL)
    storage.start()
    async with compat_client(port_of(storage)) as client:
        await until(lambda: client.exists("k9"))
        for i in range(10):
            assert await client.get(f"k{i}") == ((*ABOUT[:5], i), value_of(i))


async def test_engines_never_load_values_of_lmcache_clients(shared: ServiceProcess) -> None:
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
