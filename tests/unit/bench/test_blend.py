"""The figures of blending: their statistics, and that what is measured is blended."""

from __future__ import annotations

import math

import pytest
import torch
from lmcache_core.integrations.transformers import CachedCausalLM
from lmcache_demo.model import load_two_document_model

from tests.bench import blend_time
from tests.bench.blend import (
    FIVE_DOCUMENTS,
    NAIVE,
    NUM_QUESTIONS,
    TWO_DOCUMENTS,
    Arm,
    PromptSource,
    QualityBench,
    closed_share,
    share_of_total,
)
from tests.bench.blend_time import FULL, Prompt, Took, made_model
from tests.bench.codecs import NORMAL_95

OPTIONS = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 102,
}


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


def test_recomputing_all_is_full_recompute() -> None:
    model, tokenizer = load_two_document_model()
    source = PromptSource(tokenizer, ["a file is a sequence of bytes that has a name. " * 8])
    full, rows = QualityBench(model, list(source.draw(2, TWO_DOCUMENTS))).measure()
    whole = rows[Arm("deviation", 1.0)]
    assert whole.accuracy == full.accuracy
    assert whole.added.value == pytest.approx(0, abs=1e-4)
    assert rows[Arm(NAIVE, 0.0)].closed.value == 0
    (prompt,) = source.draw(1, FIVE_DOCUMENTS)
    assert len(prompt.documents) == 5
    # The answers are in documents of marks, not in the owners'.
    answers = set(prompt.ending[prompt.judged_places()].tolist())
    assert len(answers) == NUM_QUESTIONS
    assert answers <= set(torch.cat(prompt.documents[:-1]).tolist())
    assert not answers & set(prompt.documents[-1].tolist())


def test_all_ways_are_measured_in_turn_and_a_prompt_that_is_not_blended_is_not() -> None:
    model, prompt = made_model(OPTIONS, torch.float32), Prompt.made(364, 102, 3)
    names: list[str] = []
    arms = blend_time.measure_prompt(
        lambda name, work: names.append(name) or work(), "tiny", model, prompt, (0.0, 0.25)
    )
    assert [arm.name for arm in arms] == [FULL, "0%", "25%"]
    assert [len(arm.seconds) for arm in arms] == [blend_time.NUM_ROUNDS] * 3
    full, none, quarter = (arm.flops for arm in arms)
    assert full > quarter > none
    assert [name.rpartition(", ")[2] for name in names[3:6]] == [FULL, "0%", "25%"]
    with pytest.raises(RuntimeError, match="0 were found"):
        blend_time.blended_first_token(CachedCausalLM(model, None), prompt)


def test_a_causal_attention_is_counted_up_to_its_own_keys() -> None:
    q = torch.randn(1, 2, 8, 16)
    counts = [
        blend_time.counted(
            lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=is_causal)  # noqa: B023 (run at once)
        )
        for is_causal in (True, False)
    ]
    assert counts == [2 * 2 * pairs * 32 for pairs in (8 * 9 // 2, 8 * 8)]


def test_speed_ups_are_of_the_same_round() -> None:
    arms = [Took(FULL, 400, [6.0, 9.0, 12.0]), Took("15%", 100, [3.0, 3.0, 3.0])]
    assert blend_time.table_rows("tiny", 4_096, arms) == [
        ("tiny", "4,096", FULL, "1.00", "9.00", "1.00", ""),
        ("tiny", "4,096", "15%", "0.25", "3.00", "3.00", "goal: 2.2 times"),
    ]
