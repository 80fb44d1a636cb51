"""What the bench says of blended prefills: operations as torch counts them, arms that really
blend, and the table.
"""

from __future__ import annotations

import pytest
import torch
from lmcache_core.integrations.transformers import CachedCausalLM
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tests.bench import blend_flops, blend_speed
from tests.bench.blend_flops import Flops
from tests.bench.blend_prompts import QUESTION_TOKENS, blending_models, made_model, made_prompt

OPTIONS = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 102,
}
NUM_TOKENS, NUM_DOCUMENTS = 364, 3
RATIO = 0.25
FULL = "all: full recompute"


@pytest.fixture(scope="module")
def model():
    return made_model(OPTIONS, torch.float32)


@pytest.fixture(scope="module")
def prompt():
    return made_prompt(NUM_TOKENS, OPTIONS["vocab_size"], NUM_DOCUMENTS)


def test_operations_of_a_full_prefill_are_those_that_torch_counts(model, prompt):
    whole_attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, **__: sdpa_flop_count(q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))
        )
    }
    arm = blend_speed.full_arm(model, prompt)
    with FlopCounterMode(display=False, custom_mapping=whole_attention) as counter:
        arm.first_token()
    # torch counts all pairs of a causal attention
    pairs = blend_flops.pairs(NUM_TOKENS, NUM_TOKENS, False) - blend_flops.pairs(
        NUM_TOKENS, NUM_TOKENS, True
    )
    masked = 4 * pairs * model.config.hidden_size * model.config.num_hidden_layers
    assert counter.get_total_flops() == arm.flops.total + masked
    assert blend_flops.counted(arm.first_token)[0] == arm.flops


@pytest.mark.parametrize("ratio", [0.0, RATIO, 1.0])
def test_operations_of_a_blended_prefill_are_counted(model, prompt, ratio):
    num_computed = QUESTION_TOKENS + int(prompt.num_in_documents * ratio)
    most = blend_flops.prefill_flops(
        model.config,
        blend_flops.layers_blended(model.config, NUM_TOKENS, num_computed, check_layer=1),
    )
    full = blend_speed.full_arm(model, prompt).flops
    with blending_models(model, prompt, [ratio]) as (blending,):
        flops = blend_speed.blended_arm(blending, prompt, ratio).flops
    assert flops.linear == most.linear
    # Each chosen query needs the keys up to its own, and may be multiplied with all
    assert full.attention // 4 < flops.attention <= most.attention
    if ratio == 1.0:
        assert flops.linear == full.linear
        assert flops.attention >= full.attention


def test_a_prompt_that_is_not_blended_is_not_measured(model, prompt):
    with pytest.raises(RuntimeError, match="0 were found"):
        blend_speed.blended_arm(CachedCausalLM(model, None), prompt, RATIO)


def test_all_arms_of_a_prompt_are_measured_in_turn(model, prompt):
    names = []
    measured = blend_speed.measure_prompt(
        lambda name, work: names.append(name) or work(), "tiny", model, prompt, (0.0, RATIO)
    )
    assert [arm.name for arm in measured.arms] == [FULL, "0%", "25%"]
    assert all(len(arm.seconds) == blend_speed.NUM_ROUNDS for arm in measured.arms)
    shares = [arm.flops.total for arm in measured.arms]
    assert shares[0] > shares[2] > shares[1]
    assert names[2] == f"blend: tiny, 364 tokens, round 1 of {blend_speed.NUM_ROUNDS}, {FULL}"
    assert len(names) == 2 + 3 * blend_speed.NUM_ROUNDS


def test_the_table_holds_arms_against_the_full_prefill_of_their_round():
    def took(name, seconds, flops):
        return blend_speed.Took(name, Flops(int(flops), 0), seconds)

    found = [
        blend_speed.Measured(
            "tiny",
            num_tokens,
            [took(FULL, [6.0, 9.0, 12.0], 4e12), took("15%", [3.0, 3.0, 3.0], 1e12)],
        )
        for num_tokens in (2_048, 4_096)
    ]
    rows = blend_speed.first_tokens(found).rows
    assert rows[0] == ("tiny", "2,048", FULL, "4.000", "1.00", "9.00", "6.00 … 12.00", "1.00", "")
    assert rows[1] == ("tiny", "2,048", "15%", "1.000", "0.25", "3.00", "3.00 … 3.00", "3.00", "")
    assert rows[3][-1] == "goal: 2.2 times"


def test_documents_are_of_one_length_and_stand_in_another_order():
    prompt = made_prompt(4_096, 1_000)
    assert [len(document) for document in prompt.documents] == [504] * 8
    assert torch.equal(prompt.tokens[:504], prompt.documents[-1])
    assert int((prompt.tokens == 999).sum()) == 8
    with pytest.raises(ValueError, match="one length"):
        made_prompt(4_097, 1_000)


@pytest.fixture
def other_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_everything_is_measured_with_its_threads_and_the_others_are_given_back(
    monkeypatch, other_threads
):
    threads = set()

    def run(name, work):
        threads.add(torch.get_num_threads())
        return work()

    for name, value in {"TRIED_TOKENS": 512, "NUM_ROUNDS": 1, "NUM_THREADS": 1}.items():
        monkeypatch.setattr(blend_speed, name, value)
    for name in ("SMALL", "LARGE"):
        monkeypatch.setattr(blend_speed, name, blend_speed.Shape(name, OPTIONS, {512: (0.15,)}))
    found = blend_speed.measure(run)
    tokens, dtypes = found.sections
    assert [row[:3] for row in tokens.rows] == [
        (name, "512", share) for name in ("SMALL", "LARGE") for share in (FULL, "15%")
    ]
    assert [row[0] for row in dtypes.rows] == ["float32", "bfloat16"]
    (chosen,) = [row[0] for row in dtypes.rows if row[-1]]
    assert found.remark.startswith(f"{chosen}, 1 torch thread")
    assert threads == {1}
    assert torch.get_num_threads() == other_threads
