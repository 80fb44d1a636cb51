"""cache_storage as a process: all doors, restarts, SIGKILL."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.wire.capabilities import Accepts

from tests.fixtures.compat import compat_client
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.storage_app import TOKENS, write_tokens
from tests.fixtures.storage_process import allocator, clients_of, running_storage, until_settled
from tests.fixtures.wire import Arena
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


async def test_engines_never_load_values_of_lmcache_clients(tmp_path: Path) -> None:
    """They are no chunks of ours."""
    arena, options = Arena(), {"lmcache_compat_port": 0, "lmcache_compat_tenant": "acme"}
    tokens = write_tokens(tmp_path / "tokens.yaml")
    key = ChunkKey.of("acme", CacheEngineKey("lmcache-v0.3+", "", 1, 0, "k"))
    with running_storage(tmp_path, auth_tokens_file=tokens, **options) as storage:
        async with compat_client(storage.ports["lmcache_compat_port"]) as client:
            await client.put("k", bytes(700_000))
            assert await client.exists("k")
        url = f"lm://127.0.0.1:{storage.ports['lm_port']}"
        for lossy in (True, False):
            accepts = Accepts(lossy)
            remote = create_remote_backend(url, TOKENS["acme"], timeout_s=20, accepts=accepts)
            engine_side = EncodedBackend(remote, create_codecs({}), accepts_lossy=lossy)
            await engine_side.open()
            [result] = await engine_side.batched_get([key], arena)
            assert isinstance(result, Miss)
            assert result.reason == MissReason.ENCODING or not lossy
            await engine_side.close()
    arena.check_empty()
