"""What an engine does by its role, and what a client may ask for one request."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.integrations.vllm.requests import Role, Wishes
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


P, D = {"hands_over": True}, {"source": ""}


@pytest.mark.parametrize(
    ("role", "params", "wishes", "num_ignored"),
    [
        (BOTH, None, {}, 0),
        (PRODUCER, None, P, 0),
        (CONSUMER, None, D, 0),
        (BOTH, {"do_remote_decode": True, "do_remote_prefill": False}, P, 0),
        (BOTH, {"do_remote_prefill": True, "do_remote_decode": False}, D, 0),
        (BOTH, {"do_remote_prefill": True, "lmcache.source": "pod-7"}, {"source": "pod-7"}, 0),
        (BOTH, {"lmcache.source": "pod-7"}, {"source": "pod-7"}, 0),
        (CONSUMER, {"lmcache.source": "pod-7"}, {"source": "pod-7"}, 0),
        (PRODUCER, {"remote_decoder": {"kv_request_id": "1"}}, P, 0),
        (BOTH, {"remote_decoder": {"kv_request_id": "1"}}, P, 0),
        (CONSUMER, {"remote_decoder": {"kv_request_id": "1"}}, D, 0),
        (BOTH, {"remote_prefiller": {"remote_host": "10.1.2.3"}}, {"source": "10.1.2.3"}, 0),
        (BOTH, {"remote_kv_source": {"remote_host": "fd00::7"}}, {"source": "fd00::7"}, 0),
        (BOTH, {"remote_prefiller": {"kv_request_id": "1"}}, {}, 0),
        (BOTH, {"do_remote_decode": "true", "remote_prefiller": [1]}, {}, 2),
        (BOTH, {"remote_kv_source": {"remote_host": ["10.1.2.3"]}}, {}, 1),
        (CONSUMER, {"lmcache.source": "a b"}, D, 1),
        (CONSUMER, {"lmcache.source": "p" * 254}, D, 1),
        (CONSUMER, {"lmcache.source": "\ud800"}, D, 1),
        (CONSUMER, {"lmcache.source": "http://pod-7/"}, D, 1),
        (BOTH, {"unknown": {"remote_host": "a"}, "remote_block_ids": [1], "tp_size": 2}, {}, 0),
    ],
)
def test_proxies_say_in_many_ways_who_prefills_and_who_decodes(
    role: Role, params: object, wishes: dict[str, Any], num_ignored: int
) -> None:
    counters, request = Counters(), request_of(43)
    request.kv_transfer_params = params
    assert Wishes.of(request, role, counters) == Wishes(**wishes)
    assert counters.value(IGNORED_WISHES_TOTAL) == num_ignored


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("lmcache.skip_lookup", "lmcache.skip_save", "lmcache.source", "remote_host"),
        *("do_remote_decode", "do_remote_prefill", "remote_decoder", "remote_prefiller"),
        "remote_kv_source",
    ]
)


@given(
    params=st.dictionaries(NAMES, JSON | st.dictionaries(NAMES, JSON)) | JSON,
    role=st.sampled_from([PRODUCER, CONSUMER, BOTH]),
)
def test_parameters_of_any_content_name_an_instance_or_nothing(params: object, role: Role) -> None:
    request = request_of(43)
    request.kv_transfer_params = params
    wishes = Wishes.of(request, role, Counters())
    assert wishes.source is None or re.fullmatch("[A-Za-z0-9._:-]{0,253}", wishes.source)
    assert not wishes.hands_over or role.stores_prompts


def test_what_one_engine_returns_leads_another_one_to_its_sidecar() -> None:
    """As vLLM's proxies relay it, with the figure that vLLM adds."""
    side = scheduler_side(ScriptedStore([hot(2)], instance="pod-7"))
    request = request_of(43)
    request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
    side.new_request(request)
    returned = side.finished(request)
    assert returned is not None
    relayed = request_of(43)
    relayed.kv_transfer_params = returned | {"remote_prefill_cached_tokens": 0}
    assert Wishes.of(relayed, BOTH, Counters()) == Wishes(source="pod-7", num_workers=1)
    plain = request_of(43, "plain")
    side.new_request(plain)
    assert side.finished(plain) is None
    assert side.finished(plain) is None, "it is not known any more"


def test_engines_of_other_numbers_of_workers_hand_nothing_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ScriptedStore([hot(0)])
    side = scheduler_side(store)
    for number, num_workers in enumerate([2, 2, 1, "2"]):
        request = request_of(43, f"r{number}")
        request.kv_transfer_params = {"do_remote_prefill": True, "lmcache.workers": num_workers}
        side.num_matched(request, 0)
    assert store.sources == [None, None, "", ""]
    assert caplog.text.count("nothing is handed over between engines of 2 and 1 workers") == 1


def test_only_a_prompt_is_expected_from_elsewhere() -> None:
    """A request that was preempted asks for what it has generated, which no other engine has."""
    store = ScriptedStore([hot(0)])
    side = scheduler_side(store, role=CONSUMER)
    request = request_of(43)
    side.num_matched(request, 0)
    side.finished(request)
    for token in range(10):
        request.append(token)
    side.num_matched(request, 0)
    assert store.sources == ["", None]
