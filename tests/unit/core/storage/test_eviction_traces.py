"""What the policies are worth on the traces of the bench, shortened; and that the simulation
itself is right.
"""

from __future__ import annotations

import pytest
from lmcache_core.storage.eviction import create_policy

from tests.bench import eviction
from tests.suites.chunks import make_key

A, B, C, D = (make_key(name) for name in "abcd")


@pytest.fixture(scope="module")
def traces():
    return {
        "chat": eviction.chat_trace(num_conversations=250),
        "rag": eviction.rag_trace(num_requests=500, num_documents=250),
    }


def ratios(trace, share):
    num_slots = int(share * len({key for request in trace for key in request}))
    by_policy = {
        label: eviction.hit_ratio(trace, make(), num_slots)
        for label, make in eviction.POLICIES.items()
    }
    return (
        by_policy["LRU"],
        by_policy["adaptive (default)"],
        eviction.optimal_hit_ratio(trace, num_slots),
        by_policy,
    )


@pytest.mark.parametrize("share", eviction.CAPACITY_SHARES)
@pytest.mark.parametrize("name", ["chat", "rag"])
def test_the_default_is_never_much_worse_than_lru_and_none_beats_the_optimum(traces, name, share):
    lru, default, optimal, by_policy = ratios(traces[name], share)
    assert 0 < default >= lru - 0.015
    assert max(by_policy.values()) <= optimal <= 1


@pytest.mark.parametrize("share", [0.05, 0.10])
def test_what_is_used_once_does_not_push_out_what_is_used_again(traces, share):
    lru, default, _, _ = ratios(traces["rag"], share)
    assert default > lru + 0.02


def test_traces_are_the_same_every_time(traces):
    assert eviction.chat_trace(num_conversations=250) == traces["chat"]
    assert eviction.rag_trace(num_requests=500, num_documents=250) == traces["rag"]
    assert eviction.chat_trace(seed=9, num_conversations=250) != traces["chat"]


def test_a_chunk_behind_a_missing_one_is_no_hit():
    trace = [[A, B, C], [D], [A, B, C]]
    assert eviction.hit_ratio(trace, create_policy("lru"), 4) == 3 / 7
    assert eviction.hit_ratio(trace, create_policy("lru"), 3) == 2 / 7  # D costs C, the tail
    assert eviction.hit_ratio([[A, B, C], [D], [C, A, B]], create_policy("lru"), 3) == 0


def test_the_optimum_is_beladys():
    assert eviction.optimal_hit_ratio([[A, B], [C], [A], [B], [A]], 1) == pytest.approx(2 / 6)
    assert eviction.optimal_hit_ratio([[A, B], [C], [A], [B], [A]], 2) == pytest.approx(3 / 6)


def test_the_table_has_a_row_for_each_figure():
    ratios = dict.fromkeys([*eviction.POLICIES, "MIN"], 0.25)
    line = eviction.as_markdown(eviction.HitRatios("RAG", 0.05, ratios, ratios | {"MIN": 0.5}))
    assert {row.count("|") for row in [*eviction.head().splitlines(), line]} == {10}
    assert line.startswith("| RAG | 5% | 25.0 / 25.0 |")
    assert line.endswith("| 25.0 / 50.0 |")


def test_recorded_traces_are_the_ones_that_the_table_names():
    sizes = {
        name: (len(trace), len({key for request in trace for key in request}))
        for name in eviction.RECORDED
        for trace in [eviction.recorded_trace(name)]
    }
    assert sizes == {
        "conversation": (12_031, 182_790),
        "synthetic": (3_993, 43_924),
        "agents": (8_659, 150_278),
    }


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25])
def test_the_default_is_not_below_lru_where_requests_were_recorded(share):
    trace = eviction.recorded_trace("synthetic")
    lru, default, optimal, _ = ratios(trace, share)
    assert lru - 0.002 <= default <= optimal


@pytest.mark.parametrize("name", eviction.POLICIES)
def test_every_policy_of_the_table_orders_all_chunks(name):
    policy = eviction.POLICIES[name]()
    for key in (A, B, C, D):
        policy.on_insert(key, 1)
    policy.on_access(B)
    gone = []
    for key in policy.victims():
        policy.on_remove(key)
        gone.append(key)
    assert sorted(gone, key=str) == sorted((A, B, C, D), key=str)
    assert len(policy) == 0
