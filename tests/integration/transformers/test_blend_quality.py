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
    measure,
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


@pytest.mark.parametrize(
    ("num_documents", "num_ending", "judged", "reason"),
    [
        (
            0,
            5,
            None,
            "a prompt of 0 documents and 5 tokens after them; at least 1 and 2 are needed",
        ),
        (1, 1, None, "a prompt of 1 documents and 1 tokens after them"),
        (1, 5, [], r"judged tokens \[\] of an ending of 5; give one at least, all in 1 … 4"),
        (1, 5, [0, 2], r"judged tokens \[0, 2\] of an ending of 5"),
        (1, 5, [1, 5], r"judged tokens \[1, 5\] of an ending of 5"),
        (1, 5, [-1], r"judged tokens \[-1\] of an ending of 5"),
    ],
)
def test_a_prompt_that_cannot_be_judged_is_refused(
    model, num_documents, num_ending, judged, reason
):
    places = None if judged is None else torch.tensor(judged, dtype=torch.int64)
    prompt = SplitPrompt([document(20, 1)] * num_documents, text(num_ending, 2), places)
    with pytest.raises(ValueError, match=reason):
        prompt.judged_places()
    profile = BlendProfile("first_of_chunk", 0.0, tuple(SEPARATOR.tolist()))
    with pytest.raises(ValueError, match=reason):
        measure(
            model, [prompt, prompt], lambda retriever: blending_model_of(model, retriever, profile)
        )
