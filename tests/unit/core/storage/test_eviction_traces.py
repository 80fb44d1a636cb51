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
        by_policy["S3-LRU (default)"],
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
    row = eviction.HitRatios("RAG", 0.05, dict.fromkeys(eviction.POLICIES, 0.5), 0.75)
    head, _, line = eviction.as_markdown([row]).splitlines()
    assert head.count("|") == line.count("|")
    assert line == "| RAG | 5% | 50.0% | 50.0% | 50.0% | 75.0% |"
