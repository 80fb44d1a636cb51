"""The listener for LMCache clients in a real cache_storage, over restarts."""

from __future__ import annotations

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

from tests.fixtures.compat import ABOUT, compat_client
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.storage_app import TOKENS, bearer, write_tokens
from tests.fixtures.storage_process import running_storage, until_settled
from tests.fixtures.waiting import until
from tests.fixtures.wire import Arena

VALUE_BYTES = 700_000


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
