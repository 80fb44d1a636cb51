"""Blended prefill of a real model, with KV from a real engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.blend import CacheBlendImpl, RotaryEmbedding, SPTBlendRetriever
from lmcache_core.blend.selection import create_policy
from lmcache_core.integrations.transformers.blended import BlendingModel, rope_parameters_of
from transformers import LlamaForCausalLM

from tests.fixtures.blend_model import cached, document, full, small_llama, store, text


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_llama()


def blending(
    model: LlamaForCausalLM, retriever: SPTBlendRetriever, ratio: float, policy: str = "deviation"
) -> BlendingModel:
    executor = CacheBlendImpl(ratio, create_policy(policy, ratio))
    executor.set_mover(RotaryEmbedding(rope_parameters_of(model.config)).mover)
    return BlendingModel(model, retriever, executor)


def assert_equals_full(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], blended: BlendingModel
) -> None:
    starts = torch.tensor(
        [0, *torch.tensor([len(prompt) for prompt in prompts]).cumsum(0).tolist()]
    )
    before = starts.clone()
    got = blended.prefill(torch.cat(prompts), starts)
    assert torch.equal(starts, before)
    for i, prompt in enumerate(prompts):
        logits, layers = full(model, prompt)
        torch.testing.assert_close(got.logits[i, 0], logits, rtol=1e-4, atol=1e-4)
        for (k, v), own in zip(layers, got.caches[i].layers, strict=True):
            torch.testing.assert_close(own.keys, k, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(own.values, v, rtol=1e-4, atol=1e-4)


@st.composite
def batches(draw: st.DrawFn) -> list[list[tuple[int, int, bool]]]:
    """Of each prompt its documents: length, seed, and whether it is stored; and at last a
    question.
    """
    part = st.tuples(st.integers(0, 20), st.integers(0, 5), st.booleans())
    return draw(st.lists(st.lists(part, max_size=4), min_size=1, max_size=3))


@settings(max_examples=12, deadline=None)
@given(batches(), st.booleans())
def test_a_ratio_of_one_is_full_recompute(model, batch, saves_unfull):
    with cached(model, save_unfull_chunk=saves_unfull) as (engine, retriever):
        prompts = []
        for i, parts in enumerate(batch):
            for num_tokens, seed, is_stored in parts:
                if is_stored:
                    store(model, engine, document(num_tokens, seed))
            prompts.append(
                torch.cat(
                    [
                        *(document(num_tokens, seed) for num_tokens, seed, _ in parts),
                        text(3, 50 + i),
                    ]
                )
            )
        assert_equals_full(model, prompts, blending(model, retriever, 1.0))


def test_documents_are_found_in_another_order_and_only_some_tokens_computed(model):
    first, second, question = document(30, 1), document(22, 2), text(5, 3)
    with cached(model) as (engine, retriever):
        for one in (first, second):
            store(model, engine, one)
        prompt = torch.cat([second, first, question])
        blended = blending(model, retriever, 0.25).prefill(prompt, torch.tensor([0, len(prompt)]))
        assert blended.num_retrieved == len(first) + len(second)
        assert blended.num_computed == len(question) + (len(first) + len(second)) // 4
        _, layers = full(model, prompt)
        # On the check layer and before it everything is computed; after it what was not is close,
        # and at its new position
        for layer_id in (0, 1):
            torch.testing.assert_close(
                blended.caches[0].layers[layer_id].keys, layers[layer_id][0], rtol=1e-4, atol=1e-4
            )
        deviations = []
        for ratio in (0.0, 0.25, 0.6, 1.0):
            cache = (
                blending(model, retriever, ratio)
                .prefill(prompt, torch.tensor([0, len(prompt)]))
                .caches[0]
            )
            deviations.append(float((cache.layers[3].values - layers[3][1]).square().mean()))
        assert deviations[0] > deviations[1] > deviations[2] > deviations[3]
        assert deviations[3] < 1e-9


@pytest.mark.parametrize("num_rows", [1, 3])
def test_attention_in_blocks_is_attention_at_once(model, monkeypatch, num_rows):
    prompts = [
        torch.cat([document(22, 2), document(30, 1), text(5, 3)]),
        text(9, 4),
        torch.cat([document(30, 1), document(14, 5), text(2, 6)]),
    ]
    starts = torch.tensor(
        [0, *torch.tensor([len(prompt) for prompt in prompts]).cumsum(0).tolist()]
    )
    with cached(model) as (engine, retriever):
        for one in (document(22, 2), document(30, 1)):
            store(model, engine, one)
        monkeypatch.setattr("lmcache_core.integrations.transformers.blended.ROWS_OF_A_BLOCK", 1000)
        at_once = blending(model, retriever, 0.4).prefill(torch.cat(prompts), starts)
        monkeypatch.setattr(
            "lmcache_core.integrations.transformers.blended.ROWS_OF_A_BLOCK", num_rows
        )
        in_blocks = blending(model, retriever, 0.4).prefill(torch.cat(prompts), starts)
        assert at_once.num_computed < len(torch.cat(prompts))
        torch.testing.assert_close(in_blocks.logits, at_once.logits, rtol=1e-4, atol=1e-4)
        for one, other in zip(in_blocks.caches, at_once.caches, strict=True):
            for ours, theirs in zip(one.layers, other.layers, strict=True):
                torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


def test_logits_that_are_not_there_are_refused_before_anything_is_computed(model):
    with cached(model) as (engine, retriever):
        store(model, engine, document(30, 1))
        blended = blending(model, retriever, 0.0)
        with pytest.raises(ValueError, match="a prompt of the batch has 3"):
            blended.prefill(torch.arange(12), torch.tensor([0, 3, 12]), 5)
        with pytest.raises(ValueError, match="a prompt of the batch has 0"):
            blended.prefill(torch.arange(12), torch.tensor([0, 12, 12]))
        prompt = torch.cat([document(30, 1), text(2, 3)])
        with pytest.raises(ValueError, match="some of these were retrieved"):
            blended.prefill(prompt, torch.tensor([0, len(prompt)]), 5)


def test_threads_take_turns(model):
    prompts = [torch.cat([document(22 + i, i), document(30, 1), text(5 + i, 3)]) for i in range(4)]
    with cached(model) as (engine, retriever), ThreadPoolExecutor(4) as threads:
        for i in range(4):
            store(model, engine, document(22 + i, i))
        store(model, engine, document(30, 1))
        blended = blending(model, retriever, 0.25)

        def logits_of(prompt: torch.Tensor) -> torch.Tensor:
            return blended.prefill(prompt, torch.tensor([0, len(prompt)])).logits

        alone = [logits_of(prompt) for prompt in prompts]
        together = list(threads.map(logits_of, prompts * 5))
        assert all(torch.equal(got, alone[i % 4]) for i, got in enumerate(together))
