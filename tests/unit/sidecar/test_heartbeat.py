"""Figures in a sidecar's heartbeats, and the bytes that it alone holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.p2p import ModelFigures, PeerFigures, TierFigures
from lmcache_core.p2p.messages import MAX_COUNTED_PEERS
from lmcache_core.p2p.pull import PulledBytes
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.tiers import TierSet
from lmcache_core.telemetry import Counters
from lmcache_node.local_chunks import LocalChunks
from lmcache_sidecar import metrics
from lmcache_sidecar.heartbeat import MAX_SAMPLED_CHUNKS, ExclusiveBytes, OwnLoad, heartbeat_figures
from lmcache_sidecar.holders import Holders

from tests.fixtures.known_holders import KnownHolders, held_by
from tests.fixtures.local_chunks import hot_with, local_chunks
from tests.suites.chunks import make_key

NUM_CHUNKS = 4


@dataclass
class Remote:
    held: set[ChunkKey] = field(default_factory=set)
    is_away: bool = False

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if self.is_away:
            raise UnavailableError("no storage")
        return [key in self.held for key in keys]


def sole(
    hot: LocalCPUBackend, lookup: KnownHolders, remote: Remote | None = None
) -> ExclusiveBytes:
    return ExclusiveBytes(local_chunks(hot), remote, Holders(lookup, "a"), 60.0)  # type: ignore[arg-type]


async def test_bytes_that_neither_storage_nor_peers_hold() -> None:
    hot = hot_with(*range(NUM_CHUNKS))
    size = dict(hot.held())[make_key(3)]
    lookup = KnownHolders(held_by("b", make_key(0).key.chunk_id()))
    estimate = sole(hot, lookup, Remote({make_key(1), make_key(2)}))
    assert estimate.num_bytes is None, "nothing is known before it has asked"
    await estimate.measure()
    assert estimate.num_bytes == size
    lookup.holders |= held_by("b", make_key(3).key.chunk_id())
    await estimate.measure()
    assert estimate.num_bytes == 0


@pytest.mark.parametrize("away", ["lookup", "remote"])
async def test_unavailable_holder_leaves_the_bytes_unknown(away: str) -> None:
    estimate = sole(
        hot_with(*range(NUM_CHUNKS)),
        KnownHolders(is_away=away == "lookup"),
        Remote(is_away=away == "remote"),
    )
    await estimate.measure()
    assert estimate.num_bytes is None


async def test_only_a_sample_of_chunks_is_looked_up() -> None:
    num_chunks = 3 * MAX_SAMPLED_CHUNKS + 5
    hot, lookup = hot_with(*range(num_chunks), num_bytes=1 << 20), KnownHolders()
    estimate = sole(hot, lookup)
    await estimate.measure()
    assert estimate.num_bytes == sum(size for _, size in hot.held())
    assert lookup.num_asked <= MAX_SAMPLED_CHUNKS


async def test_engines_do_not_wait_while_chunks_are_listed() -> None:
    others_had_their_turn = threading.Event()

    class Slow(LocalChunks):
        def hottest_first(self) -> list[tuple[ChunkKey, int]]:
            assert others_had_their_turn.wait(60), "nothing else runs on the loop"
            return super().hottest_first()

    estimate = ExclusiveBytes(
        Slow(hot_with(*range(NUM_CHUNKS)), None, None, 60.0, lambda key: True),
        None,
        Holders(KnownHolders(), "a"),  # type: ignore[arg-type]
        60.0,
    )
    asyncio.get_running_loop().call_soon(others_had_their_turn.set)
    await estimate.measure()
    assert estimate.num_bytes


def test_figures_are_the_sidecars_counters() -> None:
    hot, counters, pulled = hot_with(*range(NUM_CHUNKS)), Counters(), PulledBytes()
    for name, amount, label in (
        (metrics.REQUESTED_CHUNKS_TOTAL, 9, ""),
        (metrics.LOADED_CHUNKS_TOTAL, 5, "peers"),
        (metrics.LOADED_BYTES_TOTAL, 500, "peers"),
        (metrics.MISSED_CHUNKS_TOTAL, 4, "never_stored"),
        (metrics.STORED_CHUNKS_TOTAL, 2, ""),
        (metrics.STORED_BYTES_TOTAL, 200, ""),
        (metrics.SAVED_TOKENS_TOTAL, 1280, "llama"),
        (metrics.SAVED_PREFILL_MICROSECONDS_TOTAL, 2_500_999, "llama"),
    ):
        counters.add(name, amount, label)
    pulled.add("b", 300)
    pulled.add("b", 200)
    tiers = TierSet(hot=hot, pulled=pulled)
    stats = hot.stats()
    assert heartbeat_figures(tiers, counters, None, {"llama": 64}) == PeerFigures(
        9,
        {"peers": 5},
        {"peers": 500},
        {"never_stored": 4},
        2,
        200,
        {"b": 500},
        (TierFigures(hot.name, NUM_CHUNKS, stats["used_bytes"], stats["capacity_bytes"]),),
        None,
        {"llama": ModelFigures(1280, 2500, 64)},
    )
    assert stats["used_bytes"] > 0


@pytest.mark.parametrize(("count", "model"), [(1 << 53, "m"), (10**300, "m" * 1024)])
def test_broker_accepts_heartbeats_with_any_counts(count: int, model: str) -> None:
    counters = Counters()
    for name in (
        metrics.REQUESTED_CHUNKS_TOTAL,
        metrics.STORED_CHUNKS_TOTAL,
        metrics.STORED_BYTES_TOTAL,
    ):
        counters.add(name, count)
    for name in (
        *(metrics.LOADED_CHUNKS_TOTAL, metrics.LOADED_BYTES_TOTAL, metrics.MISSED_CHUNKS_TOTAL),
        *(metrics.SAVED_TOKENS_TOTAL, metrics.SAVED_PREFILL_MICROSECONDS_TOTAL),
    ):
        counters.add(name, count, model)
    figures = heartbeat_figures(TierSet(hot=hot_with(0)), counters, count, {model: 64.0})
    assert msgspec.json.decode(msgspec.json.encode(figures), type=PeerFigures) == figures


def test_number_of_peers_in_a_heartbeat_is_bounded() -> None:
    pulled = PulledBytes()
    for i in range(MAX_COUNTED_PEERS + 2):
        pulled.add(f"p{i}", 1)
        pulled.add("often", 1)
    found = pulled
    assert len(found) == MAX_COUNTED_PEERS
    assert found["often"] == MAX_COUNTED_PEERS + 2
    assert "p0" not in found


def test_the_load_is_the_sidecar_s_own() -> None:
    """An idle one has none on a machine without an idle processor."""
    now_s, used_s = 100.0, 7.0
    load = OwnLoad(lambda: now_s, lambda: used_s)
    loads = [load()]
    for passed_s, busy_s in ((10.0, 0.0), (10.0, 2.5), (0.5, 0.5), (9.5, 4.5), (10.0, 17.0)):
        now_s, used_s = now_s + passed_s, used_s + busy_s
        loads.append(load())
    assert loads == [0.0, 0.0, 0.25, 0.25, 0.5, 1.0]
