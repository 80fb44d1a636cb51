"""What the workers are to store after a step, as the scheduler's side plans it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures.vllm_engine import FULL, STATE, Shape, window
from tests.fixtures.vllm_engine.parts import (
    ScriptedStore,
    output_of,
    request_of,
    scheduler_side,
)

TABLE = (list(range(1, 12)),)
STATES = Shape((FULL, STATE), block_size=8)


def test_resumed_request_has_new_blocks() -> None:
    side = scheduler_side(ScriptedStore([None]))
    side.new_request(request_of())
    side.plan_stores(output_of([("r", ([1, 2],), 0, 7)]), ())
    (stored,) = side.plan_stores(
        output_of(again=[("r", ([11, 12, 13, 14],), 0, 16)], resumed=["r"]), ()
    )
    assert [(run.first, run.block_ids) for run in stored.runs] == [(0, (11, 12, 13, 14))]


def states_of(output: Any, *states: tuple[int, int]) -> Any:
    """A step after which blocks of the second group hold the state after so many tokens."""
    offered = {"r": [(1, block, num_tokens) for block, num_tokens in states]}
    output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads=offered)
    return output


def test_recurrent_state_is_stored_from_the_blocks_that_vllm_names() -> None:
    side = scheduler_side(ScriptedStore([None]), STATES, save_decode_cache=True)
    request = request_of(43)
    side.new_request(request)
    first = output_of([("r", ([1, 2], [0, 7]), 0, 16)])
    (stored,) = side.plan_stores(states_of(first, (7, 16)), ())
    assert [(run.group, run.first, run.block_ids) for run in stored.runs] == [
        (0, 0, (1, 2)),
        (1, 1, (7,)),
    ]
    # Inside a block, and in a block that is already used again
    again = output_of(again=[("r", ([3, 4, 5], [0, 0, 9]), 16, 24)])
    (stored,) = side.plan_stores(states_of(again, (8, 22), (9, 40)), ())
    assert [(run.group, run.first, run.block_ids) for run in stored.runs] == [
        (0, 2, (3, 4, 5)),
        (1, 4, (9,)),
    ]
    assert side.stores.take_overwritten() == frozenset()
    for token in range(8):
        request.append(token)
    last = output_of(again=[("r", ([6], [10]), 43, 8)])
    assert side.plan_stores(states_of(last, (10, 48)), ()) == (), "behind the prompt"
    assert side.stores.take_overwritten() == {"r"}, "the state after 16 tokens is gone"


def test_nothing_is_stored_from_block_tables_that_may_be_wrong() -> None:
    side = scheduler_side(ScriptedStore([None]))
    side.new_request(request_of())
    side.plan_stores(output_of([("r", ([1, 2],), 0, 7)]), ())
    side.stores.lose_track()
    assert side.plan_stores(output_of(again=[("r", ([3, 4],), 7, 9)]), ()) == ()
    (stored,) = side.plan_stores(
        output_of(again=[("r", ([5, 6, 7, 8],), 0, 16)], resumed=["r"]), ()
    )
    assert stored.runs[0].block_ids == (5, 6, 7, 8)


@pytest.mark.parametrize(
    ("shape", "is_logged"),
    [(Shape((window(4),)), True), (Shape((FULL, window(8))), False), (Shape(), False)],
)
def test_window_shorter_than_a_chunk_is_logged(
    shape: Shape, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler_side(ScriptedStore([None]), shape)
    assert ("chunk_size=8 window=4" in caplog.text) == is_logged
