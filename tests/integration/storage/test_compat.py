"""Values of LMCache clients in a real cache_storage are no chunks for our engines."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.wire.capabilities import Accepts

from tests.fixtures.compat import compat_client
from tests.fixtures.storage_app import TOKENS, write_tokens
from tests.fixtures.storage_process import running_storage
from tests.fixtures.wire import Arena


async def test_engines_never_load_values_of_lmcache_clients(tmp_path: Path) -> None:
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
