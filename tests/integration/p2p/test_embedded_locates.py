"""An engine without a sidecar finds chunks in the remote tier where lookup says that they are,
beyond the servers that it would ask.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record import MissReason
from lmcache_core.security import Principal
from lmcache_core.storage.manager import engine_spec
from lmcache_core.storage.peer_group import PeerGroup
from lmcache_core.storage.remote.rendezvous import ranked
from lmcache_core.storage.remote.replicas import MAX_FURTHER_CHOICES
from lmcache_core.storage.tiers import build_tiers
from lmcache_core.wire.server import LmServer

from tests.fixtures.kv import make_config
from tests.fixtures.ports import free_port
from tests.fixtures.service_process import running_service
from tests.fixtures.waiting import until
from tests.fixtures.wire import MemoryStore
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

KEY = make_key("a")
NAMES = [f"s-{i}" for i in range(MAX_FURTHER_CHOICES + 3)]


@asynccontextmanager
async def storages(exits: AsyncExitStack) -> AsyncIterator[str]:
    """Their URL; the last choice of them has the chunk."""
    ports = []
    for name in NAMES:
        store = MemoryStore()
        server = LmServer(store, lambda token: Principal("default", "client", "test"), name=name)
        await server.open()
        exits.push_async_callback(server.close)
        exits.callback(store.clear)
        if name == ranked(NAMES, KEY.key.chunk_id())[-1]:
            chunk = make_chunk("a", allocate=store.arena)
            assert await store.put(chunk)
            chunk.release()
        ports.append(server.port)
    yield "lm://" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def announce(lookup_url: str, holder: str) -> None:
    client = LookupClient(lookup_url, None, 5.0)
    await client.open()
    await client.renew_instance(holder, incarnation=1, kind="storage")
    chunk_ids = [KEY.key.chunk_id()]
    await client.send_events(
        holder,
        incarnation=1,
        first_sequence=0,
        events=[StoreEvent("store", KEY.key.chunk_id(), "memory", 100)],
    )

    async def is_known() -> bool:
        return bool((await client.lookup(chunk_ids)).holders)

    await until(is_known)
    await client.close()


@pytest.mark.parametrize("is_announced", [False, True])
async def test_chunks_are_found_where_lookup_lists_them(tmp_path: Path, is_announced: bool) -> None:
    with running_service("lmcache_lookup", tmp_path, {"LMCACHE_LOOKUP_PORT": "0"}) as lookup:
        async with AsyncExitStack() as exits, storages(exits) as url:
            if is_announced:
                await announce(lookup.url, ranked(NAMES, KEY.key.chunk_id())[-1])
            config = make_config(
                enable_p2p=True,
                lookup_url=lookup.url,
                broker_url="http://127.0.0.1:1",
                distributed_url=f"lm://127.0.0.1:{free_port()}",
                remote_url=url,
                tier_timeout_s=60.0,
            )
            peers = PeerGroup(config)
            tiers = build_tiers(engine_spec(config, HostMemoryAllocator(1 << 20), peers))
            stack = tiers.stack(peers.announcer, keep_hot=False)
            await stack.open()
            exits.push_async_callback(stack.close)
            exits.push_async_callback(peers.close)
            await peers.open(stack, tiers.disk)
            remote = tiers.lower[-1]
            [got] = await remote.batched_get([KEY], tiers.hot.allocate, 60.0)
            assert payload_of(got) == (
                make_payload("a") if is_announced else MissReason.NEVER_STORED
            )
