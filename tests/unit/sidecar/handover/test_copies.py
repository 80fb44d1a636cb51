"""Copies of hot chunks from one sidecar's memory into another's, over a real lm:// connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.p2p import CopyOrder
from lmcache_core.storage.hot import HeldChunk
from lmcache_core.telemetry import Counters
from lmcache_node.drain import NodeDrain
from lmcache_sidecar import metrics
from lmcache_sidecar.handover import replication_requests as module
from lmcache_sidecar.handover.replication_requests import BrokerRequests
from lmcache_sidecar.handover.takers import PeerSource

from tests.fixtures.known_holders import KnownHolders
from tests.fixtures.local_chunks import local_chunks
from tests.suites.chunks import make_key, make_payload
from tests.unit.sidecar.handover.test_peers import (
    KEYS,
    NUM_CHUNKS,
    TOKEN,
    Broker,
    Peer,
    make_hot,
    peer,
)

pytestmark = pytest.mark.virtual_time


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
        self.hot = make_hot()
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
