"""What an engine does by its role, and what a client may ask for one request."""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_core.integrations.vllm.requests import Role
from lmcache_core.telemetry import IGNORED_WISHES_TOTAL, Counters

from tests.fixtures.vllm_engine.parts import (
    BOTH,
    ScriptedStore,
    hot,
    output_of,
    request_of,
    scheduler_side,
)

TABLE = (list(range(1, 14)),)
PRODUCER = Role(loads=False, stores_prompts=True)
CONSUMER = Role(loads=True, stores_prompts=False)


@pytest.mark.parametrize("role", [PRODUCER, CONSUMER, BOTH], ids=["producer", "consumer", "both"])
@pytest.mark.parametrize("saves_decode", [False, True])
def test_role_decides_what_is_loaded_and_stored(role: Role, saves_decode: bool) -> None:
    """A prompt of 43 tokens, in chunks of 8, of which five are there; then ten more tokens."""
    store = ScriptedStore([hot(2)])
    side = scheduler_side(store, role=role, save_decode_cache=saves_decode)
    request = request_of(43)
    side.new_request(request)
    num_loaded = 16 if role.loads else 0
    assert side.num_matched(request, 0) == (num_loaded, role.loads)
    assert bool(store.asked) == role.loads, "a producer need not ask"
    side.allocated(request, TABLE, num_loaded)
    assert len(side.plan_loads()) == role.loads
    side.step_done(None, ["r"] if role.loads else [])
    prompt = side.plan_stores(output_of([("r", TABLE, num_loaded, 43 - num_loaded)]), ())
    first, last = num_loaded // 8, 5
    chunks = [(run.first, run.num_chunks) for stored in prompt for run in stored.runs]
    assert chunks == ([(first, last - first)] if role.stores_prompts else [])
    for token in range(10):
        request.append(token)
    answer = side.plan_stores(output_of(again=[("r", None, 43, 10)]), ())
    chunks = [(run.first, run.num_chunks) for stored in answer for run in stored.runs]
    assert chunks == ([(5, 1)] if saves_decode else []), "also the end of the prompt"


@pytest.mark.parametrize("wish", ["skip_lookup", "skip_save"])
@pytest.mark.parametrize("value", [True, False, None, 1, "true", [True], {"a": 1}])
def test_client_may_ask_for_no_lookup_or_no_store(wish: str, value: Any) -> None:
    counters = Counters()
    side = scheduler_side(ScriptedStore([hot(2)]), counters=counters)
    request = request_of(43)
    request.kv_transfer_params = {f"lmcache.{wish}": value, "do_remote_decode": True, "": [[]]}
    side.new_request(request)
    num_loaded = 0 if wish == "skip_lookup" and value is True else 16
    assert side.num_matched(request, 0)[0] == num_loaded
    side.allocated(request, TABLE, num_loaded)
    side.plan_loads()
    side.step_done(None, ["r"] if num_loaded else [])
    stores = side.plan_stores(output_of([("r", TABLE, num_loaded, 43 - num_loaded)]), ())
    assert bool(stores) == (wish == "skip_lookup" or value is not True)
    assert counters.value(IGNORED_WISHES_TOTAL) == (not isinstance(value, bool))


@pytest.mark.parametrize("params", [None, [], "lmcache.skip_save", 7, {1: 2}])
def test_params_of_any_shape_cost_nothing(params: object) -> None:
    counters = Counters()
    side = scheduler_side(ScriptedStore([hot(2)]), counters=counters)
    request = request_of(43)
    request.kv_transfer_params = params
    assert side.num_matched(request, 0) == (16, True)
    assert not counters.value(IGNORED_WISHES_TOTAL)
