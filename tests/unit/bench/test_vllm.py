"""The tables of vLLM, from figures written by hand, and the sentence where there is no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import vllm
from tests.bench.vllm import COLD, CONNECTED, PLAIN, PREFIX, SHORT_AGAIN, SHORT_COLD, STORED, Took


def took(seconds: float, **figures: float) -> Took:
    return Took(seconds=seconds, cpu_seconds=seconds, num_cached=0, token=1, **figures)


def test_first_tokens_are_compared_with_those_of_the_same_round() -> None:
    prefix = [0.01, 0.02, 0.04]
    found = {row: [took(2 * seconds) for seconds in prefix] for row in vllm.NOTES}
    found[COLD] = [took(100 * seconds) for seconds in prefix]
    found[PREFIX] = [took(seconds) for seconds in prefix]
    rows = {row[0]: row[1:4] for row in vllm.first_tokens(found).rows}
    assert rows[COLD] == ("2000.0", "1", "100.00")
    assert rows[PREFIX] == ("20.0", "100", "1.00")
    assert rows[vllm.MEMORY] == ("40.0", "50", "2.00")


def test_what_a_store_costs_is_a_share_of_the_cold_request() -> None:
    found = {
        COLD: [took(10.0), took(12.0), took(9.0)],
        STORED: [
            took(seconds, store_seconds=0.05, store_cpu_seconds=0.1)
            for seconds in (10.2, 12.1, 9.4)
        ],
    }
    sidecar_cpu = {COLD: [0.1, 0.1, 0.1], STORED: [0.2, 0.2, 0.5]}
    rows = {row[0]: row[1:3] for row in vllm.overhead(found, sidecar_cpu).rows}
    assert rows["storing adds"] == ("200.0", "2.00%")
    assert rows["vLLM waits to store"] == ("50.0", "0.50%")
    assert rows["CPU time of a store: total"] == ("300.0", "3.00%")


def test_short_prompts_are_compared_pair_by_pair() -> None:
    found = {
        (SHORT_COLD, name, num_tokens): [took(factor * seconds) for seconds in (0.1, 0.2, 0.4)]
        for num_tokens in vllm.SHORT_TOKENS
        for name, factor in ((PLAIN, 1.0), (CONNECTED, 1.02))
    }
    found[SHORT_AGAIN, PLAIN, 1000] = [took(0.01)]
    found[SHORT_AGAIN, CONNECTED, 1000] = [took(0.012)]
    assert vllm.short_prompts(found).rows[:2] == [
        ("100", "200.0", "204.0", "1.02", "", "", ""),
        ("1,000", "200.0", "204.0", "1.02", "10.0", "12.0", "1.20"),
    ]


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm, "HOME", tmp_path)
    with pytest.raises(vllm.VLLMMissingError, match=r"make \.vllm/\S+/\.ready"):
        vllm.measure(lambda name, work: pytest.fail(f"{name} has begun"))
