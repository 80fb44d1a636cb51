"""Chunks from one sidecar's memory into another's, in a drain or ordered, over a real lm://
connection.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.memory import ArenaAllocator
from lmcache_core.p2p import CopyOrder, PeerStatus
from lmcache_core.security import TokenTable
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import HeldChunk, LocalCPUBackend
from lmcache_core.storage.served import LocalStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters
from lmcache_core.wire.server import LmServer
from lmcache_node.drain import DrainProgress, NodeDrain
from lmcache_sidecar import metrics
from lmcache_sidecar.handover import replication_requests as module
from lmcache_sidecar.handover.handover import PodHandover
from lmcache_sidecar.handover.replication_requests import BrokerRequests
from lmcache_sidecar.handover.takers import PeerSource
from lmcache_sidecar.holders import Holders
from lmcache_sidecar.peer_server import PeerStore

from tests.fixtures.known_holders import KnownHolders, held_by
from tests.fixtures.local_chunks import hot_with, local_chunks, put
from tests.suites.chunks import held_keys, make_key, make_payload

pytestmark = pytest.mark.virtual_time

NUM_CHUNKS = 6
NAMES = range(NUM_CHUNKS)
KEYS = [make_key(i) for i in NAMES]
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
    tmp_path: Path, name: str = "b", tenant: str = "default", **status: Any
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


async def hand_over(
    broker: Broker,
    lookup: KnownHolders,
    hot: LocalCPUBackend | None = None,
    token: str | None = TOKEN,
) -> DrainProgress:
    source = PeerSource("a", broker, Holders(lookup, "a"), token, 2.0)  # type: ignore[arg-type]
    handover = PodHandover(local_chunks(hot or hot_with(*NAMES)), [source], Counters())
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
        put(b.hot, 2)
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
            Broker([b.status]), KnownHolders(), hot_with(*NAMES, lossy=case == "lossy"), token
        )
        assert not b.hot.held()
        assert b.hot.stats()["arena_used_bytes"] == 0
        assert progress.handed_over == 0
        assert progress.left + progress.failed == NUM_CHUNKS
        assert b.counters.value(metrics.RECEIVED_CHUNKS_TOTAL) == 0


def order(name: object, taker: Peer) -> CopyOrder:
    return CopyOrder(
        make_key(name).key.chunk_id().hex(), taker.status.id, taker.status.distributed_url
    )


class Giver:
    """A sidecar that copies."""

    def __init__(self) -> None:
        self.tasks = TaskSupervisor("test")
        self.counters = Counters()
        source = PeerSource("a", Broker(), KnownHolders(), TOKEN, 2.0)  # type: ignore[arg-type]
        self.hot = hot_with(*NAMES)
        chunks = local_chunks(self.hot)
        drain = NodeDrain(1.0, None, None)  # type: ignore[arg-type]
        self.requests = BrokerRequests(drain, chunks, source.connect, self.tasks, self.counters)

    async def copy(self, orders: Sequence[CopyOrder]) -> float:
        """Bytes that were copied when all is done."""
        self.requests.copies_wanted(orders)
        await self.tasks.close(5.0)
        held = [one for one in self.hot.peek_many(KEYS) if isinstance(one, HeldChunk)]
        assert not any(one.num_holders for one in held), "what was sent is given back"
        return self.counters.value(metrics.COPIED_CHUNKS_TOTAL)


async def test_ordered_chunks_arrive_once(tmp_path: Path) -> None:
    async with peer(tmp_path) as b:
        orders = [order(name, b) for name in (1, 4)]
        assert await Giver().copy([*orders, *orders, order("not here", b)]) == 2
        for name, chunk in zip(range(NUM_CHUNKS), b.hot.get_many(KEYS), strict=True):
            assert (chunk is not None) == (name in (1, 4))
            if chunk is not None:
                assert bytes(chunk.memory.byte_array) == make_payload(name)
                chunk.release()
        assert await Giver().copy(orders) == 0, "they are there"
        assert b.counters.value(metrics.RECEIVED_CHUNKS_TOTAL) == 2


@pytest.mark.parametrize("url", ["", "lm://a:0", "http://a:1", "lm://[::1"])
async def test_order_with_a_malformed_url_costs_no_other(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with peer(tmp_path) as b:
        wrong = [CopyOrder(order(name, b).chunk_id, "wrong", url) for name in (0, 1)]
        assert await Giver().copy([*wrong, order(1, b), order(2, b)]) == 2
    assert f"copies not sent: peer={url!r}" in caplog.text
    assert "Traceback" not in caplog.text


async def test_orders_are_bounded_and_come_while_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_ORDERS", 2)
    async with peer(tmp_path) as b:
        giver = Giver()
        giver.requests.copies_wanted([order(name, b) for name in (0, 1, 2)])
        await asyncio.sleep(0)  # it has begun
        giver.requests.copies_wanted([order(3, b)])
        await giver.tasks.close(5.0)
        assert giver.counters.value(metrics.COPIED_CHUNKS_TOTAL) == 3
