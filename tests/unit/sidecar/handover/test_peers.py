"""Chunks from one sidecar's memory into another's, over a real lm:// connection."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.memory import ArenaAllocator
from lmcache_core.p2p import PeerStatus
from lmcache_core.security import TokenTable
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.served import LocalStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters
from lmcache_core.wire.server import LmServer
from lmcache_node.drain import DrainProgress
from lmcache_sidecar import metrics
from lmcache_sidecar.handover.handover import PodHandover
from lmcache_sidecar.handover.takers import PeerSource
from lmcache_sidecar.holders import Holders
from lmcache_sidecar.peer_server import PeerStore

from tests.fixtures.known_holders import KnownHolders, held_by
from tests.fixtures.local_chunks import local_chunks
from tests.suites.chunks import held_keys, make_chunk, make_key

pytestmark = pytest.mark.virtual_time

NUM_CHUNKS = 6
KEYS = [make_key(i) for i in range(NUM_CHUNKS)]
IDS = [key.key.chunk_id() for key in KEYS]
TOKEN = "sidecars-0123456789abcdef"
PEER = PeerStatus(
    id="b",
    incarnation=1,
    distributed_url="lm://127.0.0.1:1",
    load=0.0,
    draining=False,
    num_pulls=0,
    expires_in_ms=1000,
)


@dataclass
class Broker:
    """Lists the peers; fails without a list."""

    listed: list[PeerStatus] | None = None

    async def peers(self) -> list[PeerStatus]:
        if self.listed is None:
            raise UnavailableError("no broker")
        return self.listed


@dataclass
class Peer:
    hot: LocalCPUBackend
    status: PeerStatus
    counters: Counters
    is_open: bool = True


@asynccontextmanager
async def peer(
    tmp_path: Path,
    name: str = "b",
    tenant: str = "default",
    **status: Any,
) -> AsyncIterator[Peer]:
    """A sidecar's lm:// server as its lifespan makes it."""
    tokens = tmp_path / f"{name}.yaml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens.write_text(
        f"tokens:\n  - {{name: sidecar, tenant: default, role: client, token_sha256: {digest}}}\n"
    )
    hot = LocalCPUBackend(ArenaAllocator.anonymous(1 << 16), create_policy())
    stack, counters = TierStack(hot), Counters()
    await stack.open()
    made = Peer(hot, PEER, counters)
    door = PeerStore(
        LocalStore(stack, lambda: made.is_open), tenant, create_codecs({}), False, counters
    )
    server = LmServer(door, TokenTable.from_file(tokens).authenticate)
    await server.open()
    fields = {name: getattr(PEER, name) for name in PEER.__struct_fields__} | {
        "id": name,
        "distributed_url": f"lm://127.0.0.1:{server.port}",
    }
    made.status = PeerStatus(**(fields | status))
    yield made
    await server.close()
    hot.check_integrity()
    await stack.close()


def make_hot(lossy: bool = False) -> LocalCPUBackend:
    hot = LocalCPUBackend(ArenaAllocator.anonymous(1 << 16), create_policy("lru"))
    for name in range(NUM_CHUNKS):
        chunk = make_chunk(name, allocate=hot.allocate, lossy=lossy)
        hot.put_many([chunk])
        chunk.release()
    return hot


async def hand_over(
    broker: Broker,
    lookup: KnownHolders,
    hot: LocalCPUBackend | None = None,
    token: str | None = TOKEN,
) -> DrainProgress:
    source = PeerSource("a", broker, Holders(lookup, "a"), token, 2.0)  # type: ignore[arg-type]
    handover = PodHandover(local_chunks(hot or make_hot()), [source], Counters())
    progress = DrainProgress()
    await handover.run(progress, asyncio.get_running_loop().time() + 10)
    await handover.close()
    return progress


async def test_chunk_held_by_a_peer_that_stays_is_not_sent(tmp_path: Path) -> None:
    async with peer(tmp_path, "b") as b, peer(tmp_path, "leaving", draining=True) as leaving:
        holders = held_by("b", IDS[0], IDS[4]) | held_by("store", IDS[2], kind="storage")
        holders |= held_by("leaving", IDS[1]) | held_by("dead", IDS[3])
        store = msgspec.structs.replace(PEER, id="store", kind="storage", draining=True)
        progress = await hand_over(Broker([b.status, leaving.status, store]), KnownHolders(holders))
        assert set(held_keys(b.hot)) == {KEYS[1], KEYS[3], KEYS[5]}
        assert not held_keys(leaving.hot), "a draining peer takes nothing"
        assert (progress.handed_over, progress.already_elsewhere, progress.left) == (3, 3, 0)


async def test_storage_server_that_the_broker_does_not_list_holds_nothing(tmp_path: Path) -> None:
    """An impostor may have reported it to lookup."""
    async with peer(tmp_path) as b:
        store = msgspec.structs.replace(PEER, id="store", kind="storage")
        holders = held_by("unknown", *IDS[:2], kind="storage")
        holders |= held_by("b", IDS[2], kind="storage") | held_by("store", IDS[3])
        progress = await hand_over(Broker([b.status, store]), KnownHolders(holders))
        assert (progress.handed_over, progress.already_elsewhere) == (NUM_CHUNKS, 0)
        assert set(held_keys(b.hot)) == set(KEYS)


@pytest.mark.parametrize(
    "lookup", [KnownHolders(is_away=True), KnownHolders(is_degraded=True)], ids=["away", "degraded"]
)
async def test_without_lookup_the_peer_itself_is_asked(
    tmp_path: Path, lookup: KnownHolders
) -> None:
    async with peer(tmp_path) as b:
        known = make_chunk(2, allocate=b.hot.allocate)
        b.hot.put_many([known])
        known.release()
        progress = await hand_over(Broker([b.status]), lookup)
        assert (progress.handed_over, progress.already_elsewhere) == (NUM_CHUNKS - 1, 1)
        assert b.counters.value(metrics.RECEIVED_CHUNKS_TOTAL) == NUM_CHUNKS - 1


@pytest.mark.parametrize("case", ["closed", "tenant", "token", "no-token", "lossy"])
async def test_refused_chunks_are_not_stored(tmp_path: Path, case: str) -> None:
    tenants = {"tenant": "mine" if case == "tenant" else "default"}
    async with peer(tmp_path, **tenants) as b:
        b.is_open = case != "closed"
        token = {"token": "wrong-0123456789abcdef", "no-token": None}.get(case, TOKEN)
        progress = await hand_over(
            Broker([b.status]), KnownHolders(), make_hot(lossy=case == "lossy"), token
        )
        assert not b.hot.held()
        assert b.hot.stats()["arena_used_bytes"] == 0
        assert progress.handed_over == 0
        assert progress.left + progress.failed == NUM_CHUNKS
        assert b.counters.value(metrics.RECEIVED_CHUNKS_TOTAL) == 0
