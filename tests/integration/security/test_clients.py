"""The clients of the core against services that encrypt and want a certificate: the
remote tier, peers, lookup and broker.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.memory import ArenaAllocator, HostMemoryAllocator
from lmcache_core.p2p.pool import PeerPool, peer_client
from lmcache_core.record import Chunk, Result
from lmcache_core.security import ClientTls, Principal
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.manager import engine_spec
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.tiers import build_tiers
from lmcache_core.wire.client import ClientOptions
from lmcache_core.wire.server import LmServer

from tests.fixtures.guarded_services import TOKENS, Guarded
from tests.fixtures.tls import Authority, client_tls, server_tls
from tests.fixtures.wire import Arena, MemoryStore, anyone, client_in
from tests.suites.chunks import make_chunk, make_key, make_payload


def storage_url(guarded: Guarded) -> str:
    return f"lm+tls://127.0.0.1:{guarded.services['storage'].ports['lm_port']}"


async def there_and_back(tier: StorageBackend, name: str) -> list[Result]:
    arena = ArenaAllocator.anonymous(1 << 20)
    assert await tier.batched_put([make_chunk(name, tenant="acme")]) == [True]
    results = await tier.batched_get([make_key(name, "acme")], lambda n: arena.allocate((n,), None))
    assert [bytes(result.memory.byte_array) for result in results if isinstance(result, Chunk)] == [
        make_payload(name)
    ]
    for result in results:
        if isinstance(result, Chunk):
            result.release()
    assert await tier.batched_remove([make_key(name, "acme")]) == 1
    return results


async def test_the_remote_tier_of_an_embedded_engine(guarded: Guarded, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKENS["acme"] + "\n")
    options = {
        "remote_url": storage_url(guarded),
        "remote_token_file": str(token),
        "remote_tls_ca_file": str(guarded.authority.file),
        "remote_tls_cert_file": str(guarded.pod.cert),
        "remote_tls_key_file": str(guarded.pod.key),
    }
    memory = HostMemoryAllocator(1 << 16)
    spec = engine_spec(LMCacheEngineConfig.from_defaults(**options), memory)
    (tier,) = build_tiers(spec).lower
    await tier.open()
    await there_and_back(tier, "embedded")
    await tier.close()
    options["remote_tls_ca_file"] = str(tmp_path / "absent")
    with pytest.raises(ConfigError, match="absent"):
        engine_spec(LMCacheEngineConfig.from_defaults(**options), memory)


async def test_a_host_that_is_a_name_is_what_the_certificate_has_to_name(tmp_path: Path) -> None:
    """Also where the name leads to several addresses, each of which is connected to by its
    number.
    """
    authority = Authority(tmp_path)
    server = LmServer(MemoryStore(), anyone, name="storage-0")
    await server.open(server_tls(authority.sign("server", "localhost")))
    try:
        for url, is_trusted in (
            (f"lm+tls://localhost:{server.port}", True),
            (f"lm+tls://127.0.0.1:{server.port}", False),
        ):
            tier = create_remote_backend(url, None, 5.0, tls=client_tls(authority))
            await tier.open()
            if is_trusted:
                assert await tier.batched_contains([make_key("a")]) == [False]
            else:
                with pytest.raises(UnavailableError):
                    await tier.batched_contains([make_key("a")])
            await tier.close()
    finally:
        await server.close()


async def test_peers_are_spoken_to_as_their_urls_say(tmp_path: Path) -> None:
    authority, arena = Authority(tmp_path), Arena()
    stores = {scheme: MemoryStore() for scheme in ("lm", "lm+tls")}
    servers = {scheme: LmServer(store, anyone) for scheme, store in stores.items()}
    await servers["lm"].open()
    await servers["lm+tls"].open(server_tls(authority.sign("server", "peer.example")))
    pools = {
        "named": PeerPool("me", "peers", 5.0, tls=client_tls(authority, name="peer.example")),
        "unnamed": PeerPool("me", "peers", 5.0, tls=client_tls(authority)),
        "untold": PeerPool("me", "peers", 5.0),
    }
    expected = {("named", "lm"), ("named", "lm+tls"), ("unnamed", "lm"), ("untold", "lm")}
    reached = set()
    for name, pool in pools.items():
        for scheme, server in servers.items():
            client = await pool.client(f"{scheme}://127.0.0.1:{server.port}")
            try:
                await client.get([make_key("a")], arena)
            except UnavailableError:
                continue
            reached.add((name, scheme))
        await pool.close()
    assert reached == expected
    for server in servers.values():
        await server.close()


@pytest.mark.parametrize("only_encrypted", [False, True])
async def test_a_peer_that_does_not_encrypt_is_shown_no_token_where_others_do(
    tmp_path: Path, only_encrypted: bool
) -> None:
    """Otherwise a caller that may announce a peer could collect the tokens of sidecars that hand
    over their chunks.
    """
    authority = Authority(tmp_path)
    shown: dict[str, str | None] = {}

    def remember(scheme: str, token: str | None) -> Principal:
        shown[scheme] = token
        return client_in("default")

    context = client_tls(authority).context
    options = ClientOptions(tls=ClientTls(context, "peer.example", only_encrypted))
    for scheme, tls in (
        ("lm", None),
        ("lm+tls", server_tls(authority.sign("server", "peer.example"))),
    ):
        server = LmServer(MemoryStore(), lambda token, scheme=scheme: remember(scheme, token))  # type: ignore[misc]
        await server.open(tls)
        client = peer_client(f"{scheme}://127.0.0.1:{server.port}", "the-service-token", options)
        await client.ping()
        await client.close()
        await server.close()
    assert shown == {
        "lm": None if only_encrypted else "the-service-token",
        "lm+tls": "the-service-token",
    }
