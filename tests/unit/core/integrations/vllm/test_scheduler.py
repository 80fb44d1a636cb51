"""The scheduler's side, asked call by call as vLLM's scheduler does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from lmcache_core.integrations.vllm import scheduler as module
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.plan import WorkerReport, this_host
from lmcache_core.integrations.vllm.requests import RequestNamer
from lmcache_core.integrations.vllm.scheduler import SchedulerSide
from lmcache_core.keys import ChunkChain
from lmcache_core.record import Staged, StagedFrom

from tests.fixtures.vllm_engine import FULL, Shape, window
from tests.fixtures.vllm_engine.parts import (
    METADATA,
    ScriptedStore,
    groups_of,
    hot,
    options_of,
    output_of,
    request_of,
    scheduler_side,
)
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE

TABLE = (list(range(1, 12)),)
EMPTY = output_of()


class Clock:
    """Monotonic time that passes when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_workers_on_other_hosts_are_not_promised_anything(caplog: pytest.LogCaptureFixture) -> None:
    """They have another sidecar than the one that the scheduler asks."""
    for hosts, num_tokens in (({this_host()}, 40), ({this_host(), "another pod"}, 0)):
        side = scheduler_side(ScriptedStore([hot(5)]))
        side.step_done(WorkerReport(hosts=hosts), ())
        assert side.num_matched(request_of(), 0)[0] == num_tokens
    assert "another pod" in caplog.text


def test_a_request_whose_patience_has_run_out_does_not_wait_again_at_once(clock: Clock) -> None:
    """vLLM may ask again in the next step, where it has no blocks free for it."""
    side = scheduler_side(ScriptedStore([Staged(False, ())]))
    request = request_of()
    deadline = clock.now + 60.0
    while side.num_matched(request, 0)[0] is None:
        assert clock.now < deadline
        clock.now += 0.01
    for _ in range(50):
        assert side.num_matched(request, 0) == (0, False)
        clock.now += 0.01


def test_a_request_is_looked_up_when_it_comes() -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    side.new_request(request)
    assert side.num_matched(request, 0) == (40, True)
    assert side.num_matched(request, 16) == (24, True)
    assert len(store.asked) == 1, "asked again it answers from what it knows"


@pytest.mark.parametrize(
    ("shape", "num_external"),
    [(Shape(), 40), (Shape((FULL, window(6))), 39), (Shape((window(6),)), 39)],
    ids=["full", "full and windows", "windows alone"],
)
def test_a_token_is_left_to_compute(shape: Shape, num_external: int) -> None:
    """vLLM steps back by one itself, but then a window would reach a block that it has dropped."""
    side = scheduler_side(ScriptedStore([Staged(True, (b"\1" * 5,))]), shape)
    assert side.num_matched(request_of(40), 0) == (num_external, True)


def test_less_than_a_block_is_not_worth_a_load() -> None:
    side = scheduler_side(ScriptedStore([hot(5)]))
    assert side.num_matched(request_of(40), 37) == (0, False)
    assert side.num_matched(request_of(40), 36) == (4, True)


def test_a_load_is_planned_once() -> None:
    store = ScriptedStore([hot(3)])
    side = scheduler_side(store, prefill_tokens_per_s=80.0)
    request = request_of()
    assert side.num_matched(request, 8) == (16, True)
    side.allocated(request, TABLE, 16)
    (load,) = side.plan_loads()
    assert (load.request_id, load.begin, load.end, load.recompute_s) == ("r", 8, 24, 0.1)
    (run,) = load.runs
    assert (run.group, run.first, run.num_chunks, run.block_ids) == (0, 1, 2, (3, 4, 5, 6))
    assert side.plan_loads() == ()
    assert store.given_back == [], "until the workers have it"
    side.step_done(None, ["r"])
    assert store.given_back == ["r"]


@pytest.mark.parametrize(
    ("num_external", "end", "num_chunks"),
    [(39, 40, 5), (20, 20, 3)],
    ids=["the last block is loaded whole", "vLLM may want less than was offered"],
)
def test_loads_are_whole_blocks(num_external: int, end: int, num_chunks: int) -> None:
    side = scheduler_side(ScriptedStore([hot(5)]))
    request = request_of(40)
    side.num_matched(request, 0)
    side.allocated(request, TABLE, num_external)
    (load,) = side.plan_loads()
    assert (load.begin, load.end, load.runs[0].num_chunks) == (0, end, num_chunks)


def test_vllm_may_want_nothing() -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    side.num_matched(request, 0)
    side.allocated(request, TABLE, 0)
    assert side.plan_loads() == ()
    assert store.given_back == ["r"]


def test_a_load_is_told_of_twice_and_ends_when_all_workers_have_it() -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    side.num_matched(request, 0)
    side.allocated(request, TABLE, 40)
    assert len(side.plan_loads()) == 1
    side.allocated(request, TABLE, 0)
    assert side.num_matched(request, 0) == (0, False)
    side.step_done(None, ())
    assert store.given_back == []
    side.step_done(None, ["r"])
    assert store.given_back == ["r"]
    side.allocated(request, TABLE, 0)
    assert side.plan_loads() == ()


def test_where_tokens_came_from() -> None:
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


def test_a_lift_is_waited_for_and_polled_at_leisure(clock: Clock) -> None:
    store = ScriptedStore([hot(1, is_ready=False), hot(2, is_ready=False), hot(4)])
    side = scheduler_side(store)
    request = request_of()
    side.new_request(request)
    for _ in range(100):
        assert side.num_matched(request, 0) == (None, False)
    assert len(store.asked) == 1
    clock.now += 2 * module.POLL_S
    assert side.num_matched(request, 0) == (None, False)
    clock.now += 2 * module.POLL_S
    assert side.num_matched(request, 0) == (32, True)
    assert {ticket for ticket, _, _ in store.asked} == {"r"}


def test_patience_ends_and_what_is_there_is_taken(clock: Clock) -> None:
    side = scheduler_side(ScriptedStore([hot(2, is_ready=False)]), tier_timeout_s=3.0)
    request = request_of()
    side.new_request(request)
    clock.now += 3.0 + module.PATIENCE_MARGIN_S
    assert side.num_matched(request, 0) == (None, False)
    clock.now += 0.01
    assert side.num_matched(request, 0) == (16, True)


@pytest.mark.parametrize(("windows", "num_external"), [(b"\1", 16), (b"\0", 0)])
def test_what_is_there_when_patience_ends_has_its_windows(
    clock: Clock, windows: bytes, num_external: int
) -> None:
    part = hot(2, is_ready=False)
    store = ScriptedStore([part, part, Staged(True, (windows,))])
    side = scheduler_side(store, Shape((FULL, window(6))), tier_timeout_s=3.0)
    request = request_of()
    side.new_request(request)
    clock.now += 3.0 + module.PATIENCE_MARGIN_S + 0.01
    assert side.num_matched(request, 0)[0] == num_external
    assert [is_prefix for _, _, is_prefix in store.asked][:3] == [True, True, False]


@pytest.mark.parametrize(("num_found", "life"), [(5, "WHOLE_OFFER_S"), (3, "PARTIAL_OFFER_S")])
def test_old_offers_are_looked_up_again(clock: Clock, num_found: int, life: str) -> None:
    store = ScriptedStore([hot(num_found), hot(4)])
    side = scheduler_side(store)
    request = request_of()
    side.new_request(request)
    clock.now += getattr(module, life)
    assert side.num_matched(request, 0) == (8 * num_found, True)
    clock.now += 0.01
    assert side.num_matched(request, 0) == (32, True)
    assert store.given_back == ["r"]


def test_a_store_that_is_away_is_asked_again_when_the_answer_is_old(clock: Clock) -> None:
    store = ScriptedStore([None, hot(5)])
    side = scheduler_side(store)
    request = request_of()
    assert side.num_matched(request, 0) == (0, False)
    clock.now += module.PARTIAL_OFFER_S + 0.01
    assert side.num_matched(request, 0) == (40, True)


def test_nothing_is_asked_before_the_salt_is_known() -> None:
    store = ScriptedStore([hot(5)])
    identity = KVIdentity(METADATA, 1, 1)
    namer = RequestNamer(identity, CHUNK_SIZE)
    side = SchedulerSide(options_of(), groups_of(Shape()), identity, store, namer)  # type: ignore[arg-type]
    request = request_of()
    side.new_request(request)
    assert side.num_matched(request, 0) == (0, False)
    assert side.plan_stores(output_of([("r", TABLE, 0, 43)]), ()) == ()
    assert store.asked == []
    namer.use_salt("")
    assert side.num_matched(request, 0) == (40, True)


def test_prompts_shorter_than_a_chunk_are_not_asked_for() -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    assert side.num_matched(request_of(7), 0) == (0, False)
    assert store.asked == []


def test_what_failed_is_not_offered_again_and_is_stored_anew() -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    side.num_matched(request, 0)
    side.allocated(request, TABLE, 40)
    loads = side.plan_loads()
    assert side.plan_stores(output_of([("r", TABLE, 40, 3)]), loads) == (), (
        "what was loaded is stored already"
    )
    side.step_done(WorkerReport(failed={"r": 0}), ["r"])
    assert store.given_back == ["r"]
    for _ in range(3):
        assert side.num_matched(request, 0) == (0, False)
    side.allocated(request, TABLE, 0)
    (stored,) = side.plan_stores(output_of([("r", TABLE, 0, 43)]), ())
    assert stored.runs[0].num_chunks == 5
    other = request_of(name="other")
    assert side.num_matched(other, 0)[0] == 40, "others are not to blame"


@pytest.mark.parametrize("state", ["waiting", "offered", "to be loaded", "loading", "loaded"])
def test_requests_may_end_in_every_state(state: str) -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    request = request_of()
    if state == "waiting":
        store.answers = [hot(1, is_ready=False)]
    side.new_request(request)
    if state not in ("waiting", "offered"):
        side.num_matched(request, 0)
        side.allocated(request, TABLE, 40)
    if state not in ("waiting", "offered", "to be loaded"):
        side.plan_loads()
    if state == "loaded":
        side.step_done(None, ["r"])
    side.finished(request)
    assert side.plan_loads() == (), "its blocks belong to another request"
    if state in ("to be loaded", "loading"):
        assert store.given_back == [], "a worker may still read what was staged"
        side.step_done(None, ["r"])
    assert "r" in store.given_back
    assert side.plan_stores(EMPTY, ()) == ()
    side.step_done(WorkerReport(failed={"r": 0}), ())


def test_a_request_that_nobody_knows_may_end() -> None:
    scheduler_side(ScriptedStore([None])).finished(request_of())


def test_a_new_epoch_ends_what_was_known(clock: Clock) -> None:
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store)
    old = request_of()
    side.new_request(old)
    side.begin_epoch()
    assert side.num_matched(old, 0) == (0, False)
    side.allocated(old, TABLE, 0)
    assert store.given_back == ["r"]
    assert side.plan_stores(output_of([("r", TABLE, 0, 43)]), ()) == ()
    side.new_request(request_of(name="new"))
    (_, (before,), _), (_, (after,), _) = store.asked
    assert before.hashes != after.hashes


def test_recomputing_costs_what_steps_take(clock: Clock) -> None:
    """Only steps without loads, and with enough tokens, tell of a prefill's rate."""
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store, prefill_tokens_per_s=None)
    side.new_request(request_of(name="first"))
    side.plan_stores(output_of([("first", TABLE, 0, 43)]), ())
    clock.now += 0.43
    side.step_done(WorkerReport(step=side.step), ())
    request = request_of()
    side.num_matched(request, 0)
    side.allocated(request, TABLE, 40)
    (load,) = side.plan_loads()
    assert load.recompute_s == pytest.approx(CHUNK_SIZE / 100)


@pytest.mark.parametrize(
    ("rate", "saving_s"), [(None, 40 / module.ASSUMED_TOKENS_PER_S), (80.0, 40 / 80)]
)
def test_a_new_engine_also_waits_for_an_answer_as_long_as_it_is_worth(
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
def test_the_rate_is_that_of_the_engine_where_steps_overlap(
    clock: Clock, overlap: int, sizes: list[int]
) -> None:
    """Where vLLM plans a step before the one before has ended, a step takes from the end of that
    one on.
    """
    store, rate = ScriptedStore([hot(5)]), 37_000.0
    side = scheduler_side(store, prefill_tokens_per_s=None)
    running: list[tuple[int, int]] = []

    def end_one() -> None:
        num_tokens, number = running.pop(0)
        # Few tokens cost the weights' way through memory, many what they cost to compute.
        clock.now += max(num_tokens / rate, 0.02)
        side.step_done(WorkerReport(step=number) if number else None, ())

    for num_tokens in sizes:
        side.plan_stores(output_of([("r", TABLE, 0, num_tokens)]), ())
        running.append((num_tokens, side.step))
        if len(running) > overlap:
            end_one()
    while running:
        end_one()
    assert side.recompute_s == pytest.approx(CHUNK_SIZE / rate, rel=0.3)


def test_a_step_without_tokens_ends_no_other(clock: Clock) -> None:
    """Of a step in which nothing is computed vLLM tells only if something has arrived."""
    store = ScriptedStore([hot(5)])
    side = scheduler_side(store, prefill_tokens_per_s=None)
    side.plan_stores(EMPTY, ())
    side.plan_stores(output_of([("r", TABLE, 0, 400)]), ())
    number = side.step
    side.step_done(None, ["other"])
    clock.now += 2.0
    side.step_done(WorkerReport(step=number), ())
    assert side.recompute_s == pytest.approx(CHUNK_SIZE / 200)
