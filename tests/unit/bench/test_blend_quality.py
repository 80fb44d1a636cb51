"""The figures of blending: their statistics, what is read, and the plot."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
import torch
from lmcache_demo.model import load_two_document_model

from tests.bench import blend_plot
from tests.bench.blend_part import quality_section
from tests.bench.blend_quality import (
    BOTH_SIDES,
    NAIVE,
    POLICIES,
    RATIOS,
    UNMOVED,
    Arm,
    QualityBench,
    closed_share,
    share_of_total,
)
from tests.bench.codec_quality import NORMAL_95
from tests.bench.two_document_prompts import (
    FIVE_DOCUMENTS,
    NUM_QUESTIONS,
    TWO_DOCUMENTS,
    PromptSource,
)

FILLING = ["a file is a sequence of bytes that has a name, and a path leads to it. " * 8]


@pytest.fixture(scope="module")
def loaded():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_two_document_model()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(loaded):
    return PromptSource(loaded[1], FILLING)


@pytest.fixture(scope="module")
def found(loaded, source):
    return QualityBench(loaded[0], list(source.draw(4, TWO_DOCUMENTS))).measure()


def test_a_share_of_sums_has_the_interval_of_a_ratio():
    part, whole = (
        torch.tensor([1.0, 2.0, 3.0, 2.0]).double(),
        torch.tensor([4.0, 4.0, 4.0, 4.0]).double(),
    )
    got = share_of_total(part, whole)
    assert got.value == 0.5
    # With equal denominators it is the mean of quarters, whose standard error is the textbook's.
    assert got.half_width == pytest.approx(NORMAL_95 * float((part / 4).std() / math.sqrt(4)))


def test_nothing_left_is_a_closed_gap_and_everything_left_an_open_one():
    gap = torch.tensor([0.5, 1.5, 1.0]).double()
    assert closed_share(torch.zeros(3).double(), gap).value == 1
    assert closed_share(gap, gap).value == 0
    assert closed_share(gap, gap).half_width == pytest.approx(0, abs=1e-12)
    assert closed_share(gap / 4, gap).value == pytest.approx(0.75)


@pytest.mark.parametrize(("shape", "num_documents"), [(TWO_DOCUMENTS, 2), (FIVE_DOCUMENTS, 5)])
def test_prompts_are_the_same_at_every_call_and_judge_their_answers(
    loaded, source, shape, num_documents
):
    first, again = list(source.draw(3, shape)), list(source.draw(3, shape))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.tokens(), other.tokens())
        assert len(one.documents) == num_documents
        assert len(one.judged_places()) == NUM_QUESTIONS
        # What is judged stands in a document of marks, not in the owners'.
        answers = set(one.ending[one.judged_places()].tolist())
        assert answers <= set(torch.cat(one.documents[:-1]).tolist())
        assert not answers & set(one.documents[-1].tolist())


def test_all_arms_are_measured_and_computing_all_anew_is_full_recompute(found):
    full, rows = found
    assert {arm.policy for arm in rows} == {UNMOVED, NAIVE, BOTH_SIDES, *POLICIES}
    assert {arm.ratio for arm in rows if arm.policy == "deviation"} == set(RATIOS)
    assert full.computed_share == 1
    whole = rows[Arm("deviation", 1.0)]
    assert whole.computed_share == 1
    assert whole.loss_nats == pytest.approx(full.loss_nats, abs=1e-4)
    assert whole.divergence_nats == pytest.approx(0, abs=1e-4)
    assert rows[Arm(NAIVE, 0.0)].closed.value == 0
    assert (
        rows[Arm(NAIVE, 0.0)].computed_share
        < rows[Arm("deviation", 0.05)].computed_share
        < rows[Arm("deviation", 0.5)].computed_share
    )
    assert rows[Arm(UNMOVED, 0.0)].loss_nats != rows[Arm(NAIVE, 0.0)].loss_nats


def test_table_and_plot_show_every_arm(found):
    full, rows = found
    assert len(quality_section("x", full, rows).rows) == 1 + len(rows)
    drawn = blend_plot.draw(rows, POLICIES, "a & b")
    root = ElementTree.fromstring(drawn)
    places = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{places}polyline")) == len(POLICIES)
    assert len(root.findall(f"{places}circle")) == len(POLICIES) * len(RATIOS)
    assert drawn == blend_plot.draw(rows, POLICIES, "a & b")
    with pytest.raises(ValueError, match="5 curves for 4 colours"):
        blend_plot.draw(rows, ["none"] * 5, "")
