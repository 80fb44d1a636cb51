"""The statistics of the benchmarks' tables, from figures written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.bench import codecs
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
