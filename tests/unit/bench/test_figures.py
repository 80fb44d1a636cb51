"""The statistics of the benchmarks' tables, from figures written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.bench import blend_time, codecs, vllm
from tests.bench.blend import closed_share, share_of_total
from tests.bench.codecs import NORMAL_95, Speed


def test_a_share_of_sums_has_the_interval_of_a_ratio() -> None:
    part = torch.tensor([1.0, 2.0, 3.0, 2.0]).double()
    got = share_of_total(part, torch.full_like(part, 4.0))
    assert got.value == 0.5
    # With equal denominators it is the mean of quarters, whose standard error is the textbook's.
    assert got.half_width == pytest.approx(NORMAL_95 * float((part / 4).std() / math.sqrt(4)))
    gap = torch.tensor([0.5, 1.5, 1.0]).double()
    assert closed_share(torch.zeros(3).double(), gap).value == 1
    assert closed_share(gap, gap).value == 0
    assert closed_share(gap / 4, gap).value == pytest.approx(0.75)


def test_an_interval_counts_what_is_alike_within_a_document_once() -> None:
    base, other = torch.full((4,), 10.0).double(), torch.tensor([10.0, 12.0, 10.0, 12.0]).double()
    apart = codecs.relative_change(base, other, torch.tensor([0, 1, 2, 3]))
    assert apart.value == pytest.approx(0.1)
    # Residuals -1, 1, -1, 1: variance 4 * 4 / 3, of a total of 40.
    assert apart.half_width == pytest.approx(1.96 * (16 / 3) ** 0.5 / 40)
    together = codecs.relative_change(base, other, torch.tensor([0, 1, 0, 1]))
    # Two documents with residuals -2 and 2.
    assert together.half_width == pytest.approx(1.96 * (8 * 2) ** 0.5 / 40)


def test_at_the_break_even_a_load_takes_as_long_as_raw() -> None:
    coder = Speed("coder", 2, 4.0, 0.5, 2.0)
    in_turn, pipelined = codecs.break_even(coder)
    assert codecs.gain(coder, in_turn, is_pipelined=False) == pytest.approx(1.0)
    assert codecs.gain(coder, pipelined, is_pipelined=True) == pytest.approx(1.0)
    assert codecs.gain(coder, 0.001, is_pipelined=True) == pytest.approx(4.0)
    assert codecs.break_even(Speed("coder", 2, 1.0, 0.5, 2.0)) == (0.0, 0.0)


def test_speed_ups_of_blending_compare_the_same_round() -> None:
    full, some = blend_time.FULL, "15%"
    arms = [
        blend_time.Took(full, 400, [6.0, 9.0, 12.0]),
        blend_time.Took(some, 100, [3.0, 3.0, 3.0]),
    ]
    assert blend_time.table_rows("tiny", 4_096, arms) == [
        ("tiny", "4,096", full, "1.00", "9.00", "1.00", ""),
        ("tiny", "4,096", some, "0.25", "3.00", "3.00", "goal: 2.2 times"),
    ]


def took(seconds: float, **figures: float) -> vllm.Took:
    return vllm.Took(seconds=seconds, cpu_seconds=seconds, num_cached=0, token=1, **figures)


def test_first_tokens_of_vllm_compare_the_same_round() -> None:
    prefix = [0.01, 0.02, 0.04]
    found = {row: [took(2 * seconds) for seconds in prefix] for row in vllm.NOTES}
    found[vllm.COLD] = [took(100 * seconds) for seconds in prefix]
    found[vllm.PREFIX] = [took(seconds) for seconds in prefix]
    rows = {row[0]: row[1:4] for row in vllm.first_tokens(found).rows}
    assert rows[vllm.COLD] == ("2000.0", "1", "100.00")
    assert rows[vllm.PREFIX] == ("20.0", "100", "1.00")
    assert rows[vllm.MEMORY] == ("40.0", "50", "2.00")


def test_the_cost_of_a_store_is_a_share_of_the_cold_request() -> None:
    stored = [
        took(seconds, store_seconds=0.05, store_cpu_seconds=0.1) for seconds in (10.2, 12.1, 9.4)
    ]
    found = {vllm.COLD: [took(10.0), took(12.0), took(9.0)], vllm.STORED: stored}
    sidecar_cpu = {vllm.COLD: [0.1, 0.1, 0.1], vllm.STORED: [0.2, 0.2, 0.5]}
    rows = {row[0]: row[1:3] for row in vllm.overhead(found, sidecar_cpu).rows}
    assert rows["storing adds"] == ("200.0", "2.00%")
    assert rows["vLLM waits to store"] == ("50.0", "0.50%")
    assert rows["CPU time of a store: total"] == ("300.0", "3.00%")
