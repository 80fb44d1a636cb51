"""Which taker gets which chunks, and how the rest is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.telemetry import Counters
from lmcache_node.drain import DrainProgress
from lmcache_sidecar import metrics
from lmcache_sidecar.handover.handover import MAX_BATCH_BYTES, PodHandover, WaitingChunks

from tests.fixtures.local_chunks import hot_with, local_chunks
from tests.fixtures.virtual_time import CLOCK
from tests.suites.chunks import held_keys, make_key, make_payload

pytestmark = pytest.mark.virtual_time

HOUR_S = 3600.0
NUM_CHUNKS = 40
KEYS = [make_key(i) for i in range(NUM_CHUNKS)]


@dataclass
class Place:
    """A taker in memory, and the only one of its source.

    Attributes:
        taken: Payloads, in the order in which they came.
        known: Chunks that it says to have.
        refused: Chunks that it does not take.
        room: How many it takes at most.
        failures: How many calls fail first; negative: all.
        delay_s: How long each call takes.
    """

    name: str = "place"
    taken: dict[ChunkKey, bytes] = field(default_factory=dict)
    known: set[ChunkKey] = field(default_factory=set)
    refused: set[ChunkKey] = field(default_factory=set)
    room: int = NUM_CHUNKS
    failures: int = 0
    delay_s: float = 0.0
    others: Sequence[Place] = ()
    num_closed: int = 0

    async def takers(self) -> Sequence[Place]:
        return [self, *self.others]

    async def close(self) -> None:
        self.num_closed += 1

    async def has(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._call()
        return [key in self.known or key in self.taken for key in keys]

    async def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await self._call()
        kept = []
        for chunk in chunks:
            assert chunk.key not in self.taken, "nothing is sent twice"
            is_kept = chunk.key not in self.refused and len(self.taken) < self.room
            if is_kept:
                self.taken[chunk.key] = bytes(chunk.memory.byte_array)
            kept.append(is_kept)
        return kept

    async def _call(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.failures:
            self.failures -= 1
            raise UnavailableError("away")


def make_hot(num_chunks: int = NUM_CHUNKS) -> LocalCPUBackend:
    return hot_with(*range(num_chunks), num_bytes=1024 * NUM_CHUNKS)


async def hand_over(
    hot: LocalCPUBackend, *sources: Place, seconds: float = 5.0, counters: Counters | None = None
) -> DrainProgress:
    progress = DrainProgress()
    handover = PodHandover(local_chunks(hot), sources, counters or Counters())
    await handover.run(progress, asyncio.get_running_loop().time() + seconds)
    await handover.close()
    assert all(source.num_closed for source in sources)
    hot.check_integrity()
    assert all(held.num_holders == 0 for held in hot.peek_many(held_keys(hot))), (
        "every reference is given back"
    )
    assert progress.left >= 0
    return progress


async def test_all_chunks_go_to_the_only_taker_hottest_first() -> None:
    place, counters = Place(), Counters()
    progress = await hand_over(make_hot(), place, counters=counters)
    assert list(place.taken) == KEYS[::-1], "the last one stored is the hottest"
    assert all(
        data == make_payload(name)
        for name, data in zip(reversed(range(NUM_CHUNKS)), place.taken.values(), strict=True)
    )
    assert progress == DrainProgress(total=NUM_CHUNKS, handed_over=NUM_CHUNKS)
    assert counters.value(metrics.DRAINED_CHUNKS_TOTAL, "handed_over") == NUM_CHUNKS
    assert counters.value(metrics.HANDED_OVER_BYTES_TOTAL) > 1000 * NUM_CHUNKS


async def test_refused_chunk_goes_to_the_next_source_or_fails() -> None:
    first, second = Place("first", refused=set(KEYS[:3])), Place("second", refused=set(KEYS[:1]))
    progress = await hand_over(make_hot(), first, second)
    assert set(second.taken) == set(KEYS[1:3])
    assert (progress.handed_over, progress.failed, progress.left) == (NUM_CHUNKS - 1, 1, 0)


async def test_full_taker_leaves_the_rest_to_the_others() -> None:
    full, roomy = Place("full", room=3), Place("roomy", delay_s=0.001)
    full.others = [roomy]
    progress = await hand_over(make_hot(), full)
    assert len(full.taken) == 3
    assert set(roomy.taken) == set(KEYS) - set(full.taken)
    assert progress.handed_over == NUM_CHUNKS


@pytest.mark.parametrize(("failures", "num_left"), [(2, 0), (-1, NUM_CHUNKS)])
async def test_taker_is_tried_again_for_a_while(failures: int, num_left: int) -> None:
    progress = await hand_over(make_hot(), Place(failures=failures))
    assert (progress.left, progress.failed) == (num_left, 0)


@pytest.mark.parametrize("num_chunks", [3, NUM_CHUNKS])
async def test_part_of_an_unavailable_taker_goes_to_the_others(num_chunks: int) -> None:
    """Also when it had all of it in its hands while the others were idle."""
    gone, there = Place("gone", failures=-1, delay_s=0.01), Place("there")
    gone.others = [there]
    assert (await hand_over(make_hot(num_chunks), gone)).handed_over == num_chunks
    assert len(there.taken) == num_chunks


async def test_deadline_holds_while_a_taker_hangs() -> None:
    began_s = CLOCK()
    progress = await hand_over(make_hot(), Place(delay_s=HOUR_S), seconds=5.0)
    assert CLOCK() - began_s == pytest.approx(5.0)
    assert progress.left == NUM_CHUNKS


async def test_taker_that_hangs_leaves_the_next_its_part_of_the_time() -> None:
    second = Place("second")
    progress = await hand_over(make_hot(), Place("first", delay_s=HOUR_S), second)
    assert progress.handed_over == len(second.taken) == NUM_CHUNKS


async def test_chunk_evicted_meanwhile_has_failed() -> None:
    class Evicts(Place):
        async def has(self, keys: Sequence[ChunkKey]) -> list[bool]:
            hot.remove_many(KEYS[:1])
            return await super().has(keys)

    hot = make_hot(3)
    progress = await hand_over(hot, Evicts())
    assert (progress.total, progress.handed_over, progress.failed, progress.left) == (3, 2, 1, 0)


def queue(num_chunks: int = NUM_CHUNKS, num_bytes: int = 10) -> WaitingChunks:
    return WaitingChunks([(key, num_bytes) for key in KEYS[:num_chunks]])


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(MAX_BATCH_BYTES * 2, 1), (MAX_BATCH_BYTES // 2, 2), (MAX_BATCH_BYTES // 2 + 1, 1)],
)
def test_batches_are_bounded_in_bytes_but_never_empty(num_bytes: int, expected: int) -> None:
    with queue(5, num_bytes).batch("a") as batch:
        assert len(batch.keys) == expected
