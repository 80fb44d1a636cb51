"""The default policy against LRU and the optimum, on shortened traces of the bench."""

from __future__ import annotations

import pytest

from tests.bench import eviction


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
def test_default_is_never_much_worse_than_lru_and_none_beats_the_optimum(traces, name, share):
    lru, default, optimal, by_policy = ratios(traces[name], share)
    assert 0 < default >= lru - 0.015
    assert max(by_policy.values()) <= optimal <= 1


@pytest.mark.parametrize("share", [0.05, 0.10])
def test_chunks_used_once_do_not_evict_those_used_again(traces, share):
    lru, default, _, _ = ratios(traces["rag"], share)
    assert default > lru + 0.02


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25])
def test_default_is_not_below_lru_on_recorded_requests(share):
    trace = eviction.recorded_trace("synthetic")
    lru, default, optimal, _ = ratios(trace, share)
    assert lru - 0.002 <= default <= optimal
