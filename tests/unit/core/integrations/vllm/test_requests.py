"""What the scheduler's side knows of a request: its blocks, and which chunks are to be stored or
loaded from them.
"""

from __future__ import annotations

from dataclasses import replace

from lmcache_core.integrations.vllm.requests import ChunkNames, RequestState

from tests.fixtures.vllm_engine import FULL, Shape, window
from tests.fixtures.vllm_engine.parts import groups_of, request_of
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, prompt

FULL_ONLY = groups_of(Shape())
HYBRID = groups_of(Shape((FULL, window(6))))
HASHES = tuple(ChunkNames(b"root", CHUNK_SIZE).extend(prompt(1, 43)))


def state_of(groups: tuple[object, ...] = FULL_ONLY, num_blocks: int = 11) -> RequestState:
    state = RequestState(request_of(), stored=[0] * len(groups))
    state.names = ChunkNames(b"root", CHUNK_SIZE)
    state.names.extend(prompt(1, 43))
    state.set_blocks(groups, [range(1, num_blocks + 1), range(21, num_blocks + 21)][: len(groups)])  # type: ignore[arg-type]
    return state


def test_chunks_are_stored_once_they_are_whole_and_once() -> None:
    state = state_of()
    assert state.complete_runs(FULL_ONLY, CHUNK_SIZE, 7) == []
    (run,) = state.complete_runs(FULL_ONLY, CHUNK_SIZE, 23)
    assert (run.group, run.first, run.hashes, run.block_ids) == (0, 0, HASHES[:2], (1, 2, 3, 4))
    (run,) = state.complete_runs(FULL_ONLY, CHUNK_SIZE, 43)
    assert (run.first, run.hashes, run.block_ids) == (2, HASHES[2:], (5, 6, 7, 8, 9, 10))
    assert state.complete_runs(FULL_ONLY, CHUNK_SIZE, 43) == []


def test_tokens_without_a_name_yet_are_not_stored() -> None:
    state = state_of()
    (run,) = state.complete_runs(FULL_ONLY, CHUNK_SIZE, 100)
    assert len(run.hashes) == 5


def test_blocks_come_bit_by_bit() -> None:
    state = state_of(num_blocks=2)
    state.add_blocks(FULL_ONLY, [[7, 5]])
    (run,) = state.complete_runs(FULL_ONLY, CHUNK_SIZE, 16)
    assert run.block_ids == (1, 2, 7, 5)


def test_chunks_that_a_window_has_lost_are_not_stored() -> None:
    state = state_of(HYBRID)
    state.drop_blocks(HYBRID, 13)  # tokens 0 to 7 are out of the window
    full, windowed = state.complete_runs(HYBRID, CHUNK_SIZE, 24)
    assert (full.group, full.first, full.block_ids) == (0, 0, (1, 2, 3, 4, 5, 6))
    assert (windowed.group, windowed.first, windowed.hashes, windowed.block_ids) == (
        1,
        1,
        HASHES[1:3],
        (23, 24, 25, 26),
    )


def test_dropping_is_remembered() -> None:
    state = state_of(HYBRID)
    state.drop_blocks(HYBRID, 13)
    state.drop_blocks(HYBRID, 13)
    state.drop_blocks(HYBRID, 9)
    assert state.tables[1][:4] == [0, 0, 23, 24]
    state.drop_blocks(HYBRID, 18)
    assert state.tables == [list(range(1, 12)), [0, 0, 0, *range(24, 32)]]
    state.drop_blocks(HYBRID, 1000)
    assert state.tables[1] == [0] * 11
    state.set_blocks(HYBRID, [[1], [2]])
    state.drop_blocks(HYBRID, 5)
    assert state.tables == [[1], [2]]


def test_groups_that_are_not_cached_are_passed_over() -> None:
    (group,) = groups_of(Shape((FULL,)))
    moved = [replace(group, index=1)]
    state = RequestState(request_of(), stored=[0])
    state.set_blocks(moved, [[9, 9], [1, 2]])
    assert state.tables == [[1, 2]]


def test_loads_cover_the_chunks_that_overlap() -> None:
    state = state_of()
    (run,) = state.load_runs(FULL_ONLY, CHUNK_SIZE, 12, 40)
    assert (run.first, run.hashes, run.block_ids) == (1, HASHES[1:5], tuple(range(3, 11)))
    assert state.load_runs(FULL_ONLY, CHUNK_SIZE, 40, 40) == []


def test_of_a_window_only_what_the_next_token_sees_is_loaded() -> None:
    state = state_of(HYBRID)
    full, windowed = state.load_runs(HYBRID, CHUNK_SIZE, 0, 40)
    assert (full.first, len(full.hashes)) == (0, 5)
    assert (windowed.first, windowed.hashes, windowed.block_ids) == (
        4,
        HASHES[4:],
        (29, 30),
    ), "the next token sees 35 to 40"
