"""Pinned chunks: bounded, held for a limited time, and released at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage import pin_board as module
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.pin_board import PIN_BOUND, PinBoard
from lmcache_core.storage.stack import TierStack

from tests.fixtures.disk_tier import Clock
from tests.suites.chunks import make_chunk, make_key

NUM_SLOTS = 8
SLOT_BYTES = 1024


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[TierStack]:
    hot = LocalCPUBackend(ArenaAllocator.anonymous(NUM_SLOTS * SLOT_BYTES), create_policy("lru"))
    made = TierStack(hot, [DiskBackend(tmp_path, 1 << 20)])
    await made.open()
    yield made
    hot.check_integrity()
    await made.close()
    assert hot.stats()["arena_used_bytes"] == 0, "a pin outlived its board"


@pytest.fixture
def board(stack: TierStack, clock: Clock) -> Iterator[PinBoard]:
    made = PinBoard(stack, NUM_SLOTS * SLOT_BYTES, 5.0, clock)
    yield made
    made.close()


async def put(stack: TierStack, *names: object) -> None:
    for name in names:
        chunk = make_chunk(name, allocate=stack.hot.allocate)
        assert await stack.batched_put([chunk]) == [True]
        chunk.release()
        assert await stack.drain(60)


async def test_pinned_chunk_survives_pressure_until_its_time_is_over(
    stack: TierStack, board: PinBoard, clock: Clock
) -> None:
    await put(stack, "kept")
    assert await board.pin([make_key("kept")], 10) == {}
    await put(stack, *range(2 * NUM_SLOTS))
    assert stack.hot.contains_many([make_key("kept")]) == [True]
    [pin] = board.pins()
    assert (pin.key, pin.num_bytes, pin.expires_in_s) == (make_key("kept"), SLOT_BYTES, 10)
    clock.now += 9
    await board.expire()
    assert make_key("kept") in board
    clock.now += 1
    await board.expire()
    assert (len(board), board.num_bytes) == (0, 0)
    await put(stack, *range(100, 100 + NUM_SLOTS))
    assert stack.hot.contains_many([make_key("kept")]) == [False]


async def test_pinned_chunk_is_promoted_from_the_disk(stack: TierStack, board: PinBoard) -> None:
    await put(stack, "a")
    stack.hot.clear_now()
    assert await board.pin([make_key("a"), make_key("nowhere")], 10) == {
        make_key("nowhere"): "never_stored"
    }
    await board.expire()
    assert len(board) == 1
    assert stack.hot.contains_many([make_key("a")]) == [True]


async def test_pins_hold_half_of_the_memory_at_most(stack: TierStack, board: PinBoard) -> None:
    await put(stack, *range(NUM_SLOTS))
    reasons = await board.pin([make_key(name) for name in range(NUM_SLOTS)], 10)
    assert reasons == {make_key(name): PIN_BOUND for name in range(NUM_SLOTS // 2, NUM_SLOTS)}
    assert board.num_bytes == board.max_bytes == NUM_SLOTS * SLOT_BYTES // 2
    assert await board.pin([make_key(NUM_SLOTS - 1)], 10) == {make_key(NUM_SLOTS - 1): PIN_BOUND}
    board.unpin([make_key(0)])
    assert await board.pin([make_key(NUM_SLOTS - 1)], 10) == {}


async def test_pinning_again_extends_the_time_and_costs_nothing(
    stack: TierStack, board: PinBoard, clock: Clock
) -> None:
    await put(stack, "a")
    keys = [make_key("a")]
    await board.pin(keys * 2, 10)
    clock.now += 8
    await board.pin(keys, 10)
    assert (len(board), board.num_bytes, board.pins()[0].expires_in_s) == (1, SLOT_BYTES, 10)
    assert board.unpin(keys) == 1
    assert board.unpin(keys) == 0


async def test_pin_does_not_outlive_the_clearing_of_its_chunk(
    stack: TierStack, board: PinBoard
) -> None:
    await put(stack, "a")
    await board.pin([make_key("a")], 10)
    await stack.clear()
    await put(stack, "a")
    await board.expire()
    assert (len(board), board.num_bytes) == (0, 0)
    assert stack.hot.stats()["arena_used_bytes"] == SLOT_BYTES
    await board.pin([make_key("a")], 10)
    await stack.clear()
    await put(stack, "a")
    assert await board.pin([make_key("a")], 10) == {}
    await board.expire()
    assert (len(board), board.num_bytes) == (1, SLOT_BYTES)


async def test_pin_follows_the_chunk_that_replaces_a_lossy_one(
    stack: TierStack, board: PinBoard
) -> None:
    lossy = make_chunk("a", lossy=True, allocate=stack.hot.allocate)
    await stack.batched_put([lossy])
    lossy.release()
    await board.pin([lossy.key], 10)
    await put(stack, "a")
    await board.expire()
    assert stack.hot.stats()["arena_used_bytes"] == SLOT_BYTES
    await put(stack, *range(2 * NUM_SLOTS))
    assert stack.hot.contains_many([lossy.key]) == [True]
    assert (len(board), board.num_bytes) == (1, SLOT_BYTES)


async def test_pins_are_bounded_in_number(
    stack: TierStack, board: PinBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PINNED_CHUNKS", 2)
    await put(stack, *range(3))
    assert await board.pin([make_key(name) for name in range(3)], 10) == {make_key(2): PIN_BOUND}
