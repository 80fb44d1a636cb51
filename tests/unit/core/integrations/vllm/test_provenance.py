"""Chunks are stored of those of vLLM's blocks that this engine has computed or verified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.plan import WorkerReport
from lmcache_core.integrations.vllm.requests import RequestNamer
from lmcache_core.integrations.vllm.scheduler import SchedulerSide
from lmcache_core.record import Staged

from tests.fixtures.vllm_engine import FULL, STATE, Adapter, Request, Shape, window
from tests.fixtures.vllm_engine.parts import (
    METADATA,
    ScriptedStore,
    hot,
    output_of,
    request_of,
    scheduler_side,
)
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, make_adapter, prompt

LENGTH, SIZE = 43, 4
TABLE = list(range(1, 12))


def nothing_stored(shape: Shape = Shape()) -> SchedulerSide:  # noqa: B008
    return scheduler_side(ScriptedStore([None]), shape)


def sharing(num_local: int, first: int) -> tuple[list[int]]:
    """A table that shares the blocks of the first tokens with `TABLE`."""
    num_shared = num_local // SIZE
    return ([*TABLE[:num_shared], *range(first, first + 11 - num_shared)],)


def step(
    side: SchedulerSide,
    request: Request,
    tables: Sequence[Sequence[int]],
    num_local: int = 0,
    num_computed: int | None = None,
    is_resumed: bool = False,
) -> int:
    """Have vLLM compute a request that has waited, from its prefix cache or what was loaded on;
    how many chunks are stored.
    """
    assert not side.num_matched(request, num_local)[0]
    side.allocated(request, tables, 0)
    return computed(
        side, request, tables, num_local if num_computed is None else num_computed, is_resumed
    )


def computed(
    side: SchedulerSide,
    request: Request,
    tables: Sequence[Sequence[int]],
    num_computed: int,
    is_resumed: bool = False,
) -> int:
    each = request.request_id, tables, num_computed, LENGTH - num_computed
    output = output_of(again=[each], resumed=[each[0]]) if is_resumed else output_of([each])
    return num_stored(side, output, request.request_id)


def end(side: SchedulerSide, request: Request) -> None:
    side.hold(request)
    side.finished(request)


def compute_before(side: SchedulerSide) -> None:
    """Have blocks of `TABLE` computed by a request that has ended."""
    before = request_of(name="before")
    assert step(side, before, (TABLE,)) == 5
    end(side, before)


def begin_load(
    side: SchedulerSide, request: Request, tables: Sequence[list[int]] = (TABLE,)
) -> None:
    """Load three chunks."""
    assert side.num_matched(request, 0) == (24, True)
    side.allocated(request, tables, 24)
    side.plan_stores(output_of(), side.plan_loads())


def num_stored(side: SchedulerSide, output: object, name: str) -> int:
    stores = [store for store in side.plan_stores(output, ()) if store.request_id == name]
    return sum(run.num_chunks for store in stores for run in store.runs if run.group == 0)


@pytest.mark.parametrize("num_known", [0, 5])
def test_blocks_of_the_prefix_cache_of_unknown_origin_are_not_stored(num_known: int) -> None:
    """Neither is what is computed from them, by this request or by one after it."""
    side = nothing_stored()
    if num_known:
        seen = request_of(num_known * SIZE, name="seen")
        side.new_request(seen)
        side.plan_stores(output_of([("seen", (TABLE[:num_known],), 0, num_known * SIZE)]), ())
    request = request_of()
    assert step(side, request, (TABLE,), 24) == 0
    assert num_stored(side, output_of(again=[("r", ([12],), LENGTH, 1)]), "r") == 0
    assert step(side, request_of(name="after"), sharing(40, 21), 40) == 0


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_kv_that_another_connector_loads_is_not_stored(is_async: bool, is_resumed: bool) -> None:
    """Whether its bytes are right is not known, nor, in time, whether vLLM knows of a failure."""
    side = nothing_stored()
    compute_before(side)
    loading = request_of(name="loading")
    if is_resumed:
        assert step(side, loading, (list(range(41, 52)),)) == 5
    tables = (TABLE,)  # vLLM hands the blocks out again, to be loaded into
    assert not side.num_matched(loading, 8)[0]
    side.allocated(loading, tables, 0)
    if is_async:
        side.plan_stores(output_of(), ())
        # The load has ended, and others find its blocks before it continues itself.
        assert step(side, request_of(name="sooner"), sharing(24, 31), 24) == 0
        side.allocated(loading, tables, 0)
    assert computed(side, loading, tables, 24, is_resumed) == 0
    assert step(side, request_of(name="after"), sharing(24, 21), 24) == 0
    assert step(side, request_of(name="before both"), sharing(8, 61), 8) == 5, (
        "two blocks are known"
    )


@pytest.mark.parametrize(
    ("shape", "tables", "answers"),
    [
        (Shape(), (TABLE,), [hot(3)]),
        (
            Shape((FULL, window(6))),
            (TABLE, [0, 0, 0, 0, *range(25, 32)]),
            [hot(3), Staged(True, (b"\1",))],
        ),
    ],
    ids=["full", "window"],
)
def test_loaded_blocks_and_those_computed_from_them_are_stored(
    shape: Shape, tables: Sequence[list[int]], answers: list[Staged | None]
) -> None:
    side = scheduler_side(ScriptedStore([*answers, hot(0)]), shape)
    request = request_of()
    begin_load(side, request, tables)
    side.step_done(None, ["r"])
    side.allocated(request, tables, 0)
    assert computed(side, request, tables, 24) == 2
    end(side, request)
    # Their chunks may have left the sidecar since.
    shared = tuple([*table[:6], *range(61, 66)] for table in tables)
    assert step(side, request_of(name="other"), shared, 24) == 5


@pytest.mark.parametrize(
    ("first_bad", "shared", "stored"), [(0, 4, 0), (8, 4, 5), (8, 8, 5), (8, 12, 0), (16, 16, 5)]
)
def test_only_blocks_before_the_failure_of_a_load_are_known(
    first_bad: int, shared: int, stored: int
) -> None:
    """Its request is aborted before it has computed the rest; blocks that were computed before
    are handed out again for it.
    """
    side = scheduler_side(ScriptedStore([None, hot(3), hot(0)]))
    compute_before(side)
    request = request_of()
    begin_load(side, request)
    side.step_done(WorkerReport(failed={"r": 20}), ())
    side.step_done(WorkerReport(failed={"r": first_bad}), ["r"])
    end(side, request)
    assert step(side, request_of(name="after"), sharing(shared, 21), shared) == stored


@pytest.mark.parametrize("is_resumed", [False, True])
def test_request_may_begin_after_blocks_that_the_same_step_computes(is_resumed: bool) -> None:
    side = nothing_stored()
    first, second = request_of(name="first"), request_of(name="second")
    if is_resumed:
        assert step(side, first, (list(range(41, 52)),)) == 5
    for request, num_local, tables in ((first, 0, (TABLE,)), (second, 24, sharing(24, 21))):
        assert not side.num_matched(request, num_local)[0]
        side.allocated(request, tables, 0)
    one, other = ("first", (TABLE,), 0, LENGTH), ("second", sharing(24, 21), 24, 19)
    output = output_of([other], [one], ["first"]) if is_resumed else output_of([one, other])
    assert num_stored(side, output, "second") == 5


def test_new_blocks_of_a_running_request_are_known_if_its_others_are() -> None:
    side = nothing_stored()
    for name, num_local, table in (("known", 0, TABLE[:4]), ("unknown", 8, [81, 82, 83, 84])):
        request = request_of(name=name)
        assert not side.num_matched(request, num_local)[0]
        side.allocated(request, (table,), 0)
        side.plan_stores(output_of([(name, (table,), num_local, 16 - num_local)]), ())
    more = [("known", (TABLE[4:],), 16, 27), ("unknown", (list(range(85, 92)),), 16, 27)]
    assert [store.request_id for store in side.plan_stores(output_of(again=more), ())] == ["known"]
    assert step(side, request_of(name="after"), sharing(40, 21), 40) == 5
    again = ([*range(81, 91), 99],)
    assert step(side, request_of(name="after the other"), again, 40) == 0
    # Blocks of the one that is known, handed to the other
    side.plan_stores(output_of(again=[("unknown", (TABLE[8:10],), LENGTH, 1)]), ())
    assert step(side, request_of(name="later"), sharing(40, 31), 40) == 0


def test_blocks_computed_before_the_salt_was_known_are_stored() -> None:
    """The sidecar may come later than the prefix that all requests share."""
    namer = RequestNamer(KVIdentity(METADATA, 1, 1), CHUNK_SIZE)
    side = scheduler_side(ScriptedStore([None]), namer=namer)
    assert step(side, request_of(name="first"), (TABLE,)) == 0
    namer.use_salt("")
    assert step(side, request_of(name="second"), sharing(40, 21), 40) == 5


def test_blocks_of_an_earlier_epoch_are_not_stored() -> None:
    """vLLM may offer them: it forgets its prefix cache by another call."""
    side = nothing_stored()
    running = request_of(name="running")
    assert step(side, running, (TABLE,)) == 5
    side.begin_epoch()
    side.plan_stores(output_of(again=[("running", ([12],), LENGTH, 1)]), ())
    assert step(side, request_of(name="new"), sharing(24, 21), 24) == 0
    assert step(side, request_of(name="newer"), (list(range(41, 52)),)) == 5


def test_blocks_of_an_adapter_that_was_reloaded_are_not_stored(tmp_path: Path) -> None:
    """vLLM's prefix cache knows an adapter's name and not its files."""
    side = nothing_stored()

    def request(name: str, adapter: Adapter | None) -> Request:
        return Request(name, prompt(1, LENGTH), 4, SIZE, adapter=adapter)

    path = str(make_adapter(tmp_path, "one"))
    adapter = Adapter("adapter", path)
    assert step(side, request("first", adapter), (TABLE,)) == 5
    assert step(side, request("second", adapter), sharing(24, 21), 24) == 5
    assert step(side, request("without", None), sharing(24, 31), 24) == 0
    make_adapter(tmp_path, "another")
    reloaded = Adapter("adapter", path, load_inplace=True)
    assert step(side, request("third", reloaded), sharing(24, 41), 24) == 0
    assert step(side, request("fourth", reloaded), (list(range(61, 72)),)) == 5


def test_nothing_is_stored_after_states_of_unknown_origin() -> None:
    side = nothing_stored(Shape((FULL, STATE), block_size=8))
    first = request_of(name="first")
    tables = [1, 2, 3, 4, 5, 6], [0, 0, 11, 0, 12, 13]
    assert step(side, first, tables) == 5
    kept, lost = ([1, 2, 3, 4, 5, 21], [0, 0, 0, 0, 12, 22]), ([1, 2, 3, 4, 5, 31], [0] * 4 + [32])
    assert step(side, request_of(name="after"), kept, 40) == 5
    assert step(side, request_of(name="after another"), lost, 40) == 0


def test_blocks_of_a_request_that_is_not_followed_are_unknown() -> None:
    side = nothing_stored()
    assert step(side, request_of(name="first"), (TABLE,)) == 5
    side.plan_stores(output_of([("unseen", (TABLE,), 0, 24)]), ())
    assert step(side, request_of(name="after"), sharing(24, 21), 24) == 0
