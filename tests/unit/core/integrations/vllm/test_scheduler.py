"""The scheduler's side, called as vLLM's scheduler does: what it loads, and what it has stored."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations.vllm import scheduler as module
from lmcache_core.integrations.vllm.plan import WorkerReport, this_host
from lmcache_core.keys import ChunkChain
from lmcache_core.record import Staged, StagedFrom

from tests.fixtures.held_clock import HeldClock
from tests.fixtures.vllm_engine import FULL, STATE, Shape, window
from tests.fixtures.vllm_engine.parts import (
    ScriptedStore,
    hot,
    output_of,
    request_of,
    scheduler_side,
)
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE

TABLE = (list(range(1, 12)),)
EMPTY = output_of()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    held = HeldClock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=held))
    return held


def test_nothing_is_promised_to_workers_on_other_hosts(caplog: pytest.LogCaptureFixture) -> None:
    """They have another sidecar than the one that the scheduler asks."""
    for hosts, num_tokens in (({this_host()}, 40), ({this_host(), "another pod"}, 0)):
        side = scheduler_side(ScriptedStore([hot(5)]))
        side.step_done(WorkerReport(hosts=hosts), ())
        assert side.num_matched(request_of(), 0)[0] == num_tokens
    assert "another pod" in caplog.text


def test_request_whose_patience_has_ended_does_not_wait_again_at_once(clock: HeldClock) -> None:
    """vLLM may ask again in the next step, if it has no free blocks for it."""
    side = scheduler_side(ScriptedStore([Staged(False, ())]))
    request = request_of()
    for _ in range(10_000):
        if side.num_matched(request, 0)[0] is not None:
            break
        clock.now_s += 0.01
    for _ in range(50):
        assert side.num_matched(request, 0) == (0, False)
        clock.now_s += 0.01


def test_less_than_a_block_is_not_loaded() -> None:
    side = scheduler_side(ScriptedStore([hot(5)]))
    assert side.num_matched(request_of(40), 37) == (0, False)
    assert side.num_matched(request_of(40), 36) == (4, True)


def test_load_is_planned_once_and_its_ticket_kept_until_all_workers_have_it() -> None:
    store = ScriptedStore([hot(3)])
    side = scheduler_side(store, prefill_tokens_per_s=80.0)
    request = request_of()
    assert side.num_matched(request, 8) == (16, True)
    side.allocated(request, TABLE, 16)
    (load,) = side.plan_loads()
    assert (load.request_id, load.begin, load.end, load.recompute_s) == ("r", 8, 24, 0.1)
    (run,) = load.runs
    assert (run.group, run.first, run.num_chunks, run.block_ids) == (0, 1, 2, (3, 4, 5, 6))
    side.allocated(request, TABLE, 0)  # vLLM calls it again when the load has ended
    assert side.num_matched(request, 0) == (0, False)
    assert side.plan_loads() == ()
    assert store.given_back == []
    side.step_done(None, ["r"])
    assert store.given_back == ["r"]


def test_origins_of_tokens_are_counted() -> None:
    tiers = bytes([StagedFrom.HOT, StagedFrom.DISK, StagedFrom.DISK, StagedFrom.REMOTE, 0])
    side = scheduler_side(ScriptedStore([Staged(True, (tiers,))]))
    request = request_of()
    assert side.origins_of(request, 8) == {}
    side.num_matched(request, 4)
    side.allocated(request, TABLE, 28)
    assert side.origins_of(request, 28) == {
        StagedFrom.HOT: 4,
        StagedFrom.DISK: 16,
        StagedFrom.REMOTE: 8,
    }


def test_lift_is_waited_for_and_polled_now_and_then(clock: HeldClock) -> None:
    store = ScriptedStore([hot(1, is_ready=False), hot(2, is_ready=False), hot(4)])
    side = scheduler_side(store)
    request = request_of()
    side.new_request(request)
    for _ in range(100):
        assert side.num_matched(request, 0) == (None, False)
    assert len(store.asked) == 1
    clock.now_s += 2 * module.POLL_S
    assert side.num_matched(request, 0) == (None, False)
    clock.now_s += 2 * module.POLL_S
    assert side.num_matched(request, 0) == (32, True)
    assert {ticket for ticket, _, _ in store.asked} == {"r"}


def test_patience_ends_and_what_is_there_is_taken(clock: HeldClock) -> None:
    side = scheduler_side(ScriptedStore([hot(2, is_ready=False)]), tier_timeout_s=3.0)
    request = request_of()
    side.new_request(request)
    clock.now_s += 3.0 + module.PATIENCE_MARGIN_S
    assert side.num_matched(request, 0) == (None, False)
    clock.now_s += 0.01
    assert side.num_matched(request, 0) == (16, True)


@pytest.mark.parametrize(("windows", "num_external"), [(b"\1", 16), (b"\0", 0)])
def test_what_is_there_when_patience_ends_has_its_windows(
    clock: HeldClock, windows: bytes, num_external: int
) -> None:
    part = hot(2, is_ready=False)
    store = ScriptedStore([part, part, Staged(True, (windows,))])
    side = scheduler_side(store, Shape((FULL, window(6))), tier_timeout_s=3.0)
    request = request_of()
    side.new_request(request)
    clock.now_s += 3.0 + module.PATIENCE_MARGIN_S + 0.01
    assert side.num_matched(request, 0)[0] == num_external
    assert [is_prefix for _, _, is_prefix in store.asked][:3] == [True, True, False]


@pytest.mark.parametrize(("num_found", "life"), [(5, "WHOLE_OFFER_S"), (3, "PARTIAL_OFFER_S")])
def test_old_offers_are_looked_up_again(clock: HeldClock, num_found: int, life: str) -> None:
    store = ScriptedStore([hot(num_found), hot(4)])
    side = scheduler_side(store)
    request = request_of()
    side.new_request(request)
    clock.now_s += getattr(module, life)
    assert side.num_matched(request, 0) == (8 * num_found, True)
    clock.now_s += 0.01
    assert side.num_matched(request, 0) == (32, True)
    assert store.given_back == ["r"]


@pytest.mark.parametrize(
    ("rate", "saving_s"), [(None, 40 / module.ASSUMED_TOKENS_PER_S), (80.0, 40 / 80)]
)
def test_new_engine_waits_for_an_answer_as_long_as_it_can_save(
    rate: float | None, saving_s: float
) -> None:
    savings: list[object] = []

    class Asked(ScriptedStore):
        def stage(
            self,
            ticket: str,
            chains: Sequence[ChunkChain],
            *,
            is_prefix: bool = True,
            **how: float | None,
        ) -> Staged | None:
            savings.append(how["saving_s"])
            return super().stage(ticket, chains, is_prefix=is_prefix)

    side = scheduler_side(Asked([hot(5)]), prefill_tokens_per_s=rate)
    assert side.num_matched(request_of(), 0)[0] == 40
    assert savings == [saving_s]


@pytest.mark.parametrize(
    "overlap", [0, 1, 2], ids=["one after the other", "async scheduling", "three in the pipeline"]
)
@pytest.mark.parametrize(
    "sizes",
    [[2048] * 40, [64, 8192, 64, 64] * 10, [2048, 8192, 512] * 15],
    ids=["prefills", "between decodes", "mixed"],
)
def test_rate_is_that_of_the_engine_where_steps_overlap(
    clock: HeldClock, overlap: int, sizes: list[int]
) -> None:
    """If vLLM plans a step before the previous one has ended, it takes from the end of that one
    on.
    """
    store, rate = ScriptedStore([hot(5)]), 37_000.0
    side = scheduler_side(store, prefill_tokens_per_s=None)
    running: list[tuple[int, int]] = []

    def end_one() -> None:
        num_tokens, number = running.pop(0)
        # Few tokens cost the weights' way through memory, many what they cost to compute.
        clock.now_s += max(num_tokens / rate, 0.02)
        side.step_done(WorkerReport(step=number) if number else None, ())

    for num_tokens in sizes:
        side.plan_stores(output_of([("r", TABLE, 0, num_tokens)]), ())
        running.append((num_tokens, side.step))
        if len(running) > overlap:
            end_one()
    while running:
        end_one()
    assert side.recompute_s == pytest.approx(CHUNK_SIZE / rate, rel=0.3)


def test_step_without_tokens_ends_no_other(clock: HeldClock) -> None:
    """Of a step that computes nothing, vLLM reports only arrivals."""
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store, prefill_tokens_per_s=None)
    side.plan_stores(EMPTY, ())
    side.plan_stores(output_of([("r", TABLE, 0, 400)]), ())
    number = side.step
    side.step_done(None, ["other"])
    clock.now_s += 2.0
    side.step_done(WorkerReport(step=number), ())
    assert side.recompute_s == pytest.approx(CHUNK_SIZE / 200)


STATES = Shape((FULL, STATE), block_size=8)


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
    assert side.plan_stores(states_of(last, (10, 48)), ()) == (), "after the prompt"
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


def test_failed_load_is_not_offered_again_and_its_chunks_are_stored_again() -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    side.num_matched(request, 0)
    side.allocated(request, TABLE, 40)
    loads = side.plan_loads()
    assert side.plan_stores(output_of([("r", TABLE, 40, 3)]), loads) == (), "stored already"
    side.step_done(WorkerReport(failed={"r": 0}), ["r"])
    assert store.given_back == ["r"]
    assert side.num_matched(request, 0) == (0, False)
    side.allocated(request, TABLE, 0)
    (stored,) = side.plan_stores(output_of([("r", TABLE, 0, 43)]), ())
    assert stored.runs[0].num_chunks == 5
    assert side.num_matched(request_of(name="other"), 0)[0] == 40


@pytest.mark.parametrize("num_calls", range(4), ids=["offered", "planned", "loading", "loaded"])
def test_request_may_end_in_every_state(num_calls: int) -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    side.num_matched(request, 0)
    if num_calls > 0:
        side.allocated(request, TABLE, 40)
    if num_calls > 1:
        side.plan_loads()
    if num_calls > 2:
        side.step_done(None, ["r"])
    side.finished(request)
    assert side.plan_loads() == (), "its blocks belong to another request"
    if num_calls in (1, 2):
        assert store.given_back == [], "a worker may still read the staged chunks"
        side.step_done(None, ["r"])
    assert "r" in store.given_back
    side.step_done(WorkerReport(failed={"r": 0}), ())


def test_offer_that_vllm_does_not_want_is_given_back() -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    side.num_matched(request, 0)
    side.allocated(request, TABLE, 0)
    assert side.plan_loads() == ()
    assert store.given_back == ["r"]
