"""Which tokens of a prompt are judged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lmcache_core.blend.certificate import BlendProfile
from lmcache_core.integrations.transformers.blend_quality import (
    DocumentRetriever,
    PromptQuality,
    SplitPrompt,
    compare,
)
from lmcache_core.integrations.transformers.blended import blending_model_of
from transformers import LlamaForCausalLM

from tests.fixtures.blend_model import SEPARATOR, document, small_llama, text


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_llama()


def test_only_judged_tokens_are_measured(model):
    """Whose loss after full recompute is that of the model's own reading, at those places and no
    others.
    """
    documents, ending = [document(20, 1), document(24, 2)], text(12, 3)
    tokens, num_kept = torch.cat([*documents, ending]), sum(map(len, documents))
    losses = F.cross_entropy(
        model(input_ids=tokens[None]).logits[0, :-1], tokens[1:], reduction="none"
    ).detach()
    profile = BlendProfile("first_of_chunk", 0.0, tuple(SEPARATOR.tolist()))
    retriever = DocumentRetriever(model)
    blended = blending_model_of(model, retriever, profile)

    def quality(judged: torch.Tensor | None) -> PromptQuality:
        prompt = SplitPrompt(documents, ending, judged)
        retriever.compute(prompt)
        return compare(model, blended, prompt)

    places = [1, 4, 11]
    some, one_by_one = (
        quality(torch.tensor(places)),
        [quality(torch.tensor([place])) for place in places],
    )
    assert some.num_tokens == 3
    assert some.full_loss_nats == pytest.approx(
        float(losses[[num_kept + place - 1 for place in places]].sum()), rel=1e-4
    )
    assert some.kl_nats == pytest.approx(sum(one.kl_nats for one in one_by_one), rel=1e-4)
    assert some.blended_loss_nats == pytest.approx(
        sum(one.blended_loss_nats for one in one_by_one), rel=1e-4
    )
    assert quality(None) == quality(torch.arange(1, 12))
    assert (some.num_reused, some.num_prompt_tokens) == (num_kept, len(tokens))
