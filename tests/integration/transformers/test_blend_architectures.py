"""Models are blended only if their layers are computed as they compute themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lmcache_core.blend.certificate import BlendProfile
from lmcache_core.integrations.transformers.architectures import (
    BLENDED_ARCHITECTURES,
    reason_against_layers,
    reason_against_rotation,
)
from lmcache_core.integrations.transformers.blend_quality import DocumentRetriever, SplitPrompt
from lmcache_core.integrations.transformers.blended import blending_model_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

VOCAB = 100
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
KNOWN = [
    ("llama", {}),
    (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    ("llama", {"attn_implementation": "eager", "num_key_value_heads": 4}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
]


def made(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(
        kind, **small | special | {"vocab_size": VOCAB, "max_position_embeddings": 256} | options
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:  # norms and biases that would be noticed if they were left out
            nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def prompt_of(num_endings: int = 6) -> SplitPrompt:
    generator = torch.Generator().manual_seed(1)
    first, second, ending = (
        torch.randint(0, VOCAB, (n,), generator=generator) for n in (21, 34, num_endings)
    )
    return SplitPrompt([first, second], ending)


def distance_from_full(model: PreTrainedModel, policy: str, ratio: float) -> float:
    """Largest difference of the ending's logits between a blended and a full prefill."""
    retriever, prompt = DocumentRetriever(model), prompt_of()
    blended = blending_model_of(model, retriever, BlendProfile(policy, ratio, (VOCAB,)))
    retriever.compute(prompt)
    tokens, num_kept = prompt.tokens(), len(prompt.ending)
    got = blended.prefill(tokens, torch.tensor([0, len(tokens)]), num_kept)
    assert got.num_retrieved == len(tokens) - num_kept
    with torch.inference_mode():
        full = model(input_ids=tokens[None]).logits[0, -num_kept:]
    return float((got.logits[0] - full).abs().max())


@pytest.mark.parametrize(("kind", "options"), KNOWN)
def test_a_ratio_of_one_is_full_recompute(kind: str, options: dict[str, Any]) -> None:
    model = made(kind, **options)
    assert distance_from_full(model, "deviation", 1.0) < 2e-5
    assert distance_from_full(model, "first_of_chunk", 0.0) > 1e-2, (
        "reused as it is, it is something else"
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("kind", "options"), KNOWN)
def test_keys_are_moved_as_the_model_rotates(kind: str, options: dict[str, Any], rope: str) -> None:
    """Where no layer but the last lets tokens see one another, KV depends on the position alone,
    and nothing needs to be recomputed.
    """
    model = made(
        kind, **options, rope_parameters={"rope_type": rope, "rope_theta": 1e4} | ROPES[rope]
    )
    for layer in model.model.layers[:-1]:
        for parameter in layer.self_attn.o_proj.parameters():
            nn.init.zeros_(parameter)
    assert distance_from_full(model, "first_of_chunk", 0.0) < 5e-5


def test_every_architecture_is_proved() -> None:
    assert {type(made(kind, **options)).__name__ for kind, options in KNOWN} == {
        f"{kind}ForCausalLM" for kind in BLENDED_ARCHITECTURES
    }


class OtherLlama(LlamaForCausalLM):
    """May compute anything."""


def patched() -> PreTrainedModel:
    class Attention(nn.Module):
        pass

    model = made("llama")
    model.model.layers[2].self_attn = Attention()
    return model


UNKNOWN = {
    "capped attention": (lambda: made("gemma2", head_dim=8), "Gemma2ForCausalLM"),
    "a class of a user": (lambda: OtherLlama(made("llama").config), "OtherLlama"),
    "a changed layer": (patched, "patched.<locals>.Attention"),
    "a window": (lambda: made("mistral", sliding_window=16), "sliding window"),
    "rotates by the prompt's length": (
        lambda: made(
            "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "length of each prompt",
    ),
    "says that it rotates a part, and rotates all": (
        lambda: made(
            "llama",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        ),
        "other frequencies",
    ),
    "frequencies rounded by a cast": (
        lambda: made("llama").to(torch.bfloat16),
        "give the dtype where it is loaded",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_architecture_is_refused_by_name(case: str) -> None:
    make, words = UNKNOWN[case]
    model = make()
    with pytest.raises(ValueError, match=re.escape(words)):
        blending_model_of(model, DocumentRetriever(model), BlendProfile("deviation", 1.0, (VOCAB,)))


def test_attention_that_may_be_another_is_refused() -> None:
    model = made("llama")
    assert (reason_against_layers(model), reason_against_rotation(model)) == (None, None)
    model.config._attn_implementation_internal = "my_own_attention"
    assert "my_own_attention" in (reason_against_layers(model) or "")


@pytest.mark.parametrize("disturb", [nn.Module.train, lambda model: add_hook(model)])
def test_model_that_computes_noise_or_has_hooks_is_not_blended(disturb: Any) -> None:
    model = made("llama")
    disturb(model)
    with pytest.raises(ValueError, match=r"is in train mode|has a hook"):
        blending_model_of(model, DocumentRetriever(model), BlendProfile("deviation", 1.0, (VOCAB,)))


def add_hook(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda _m, _i, output: output * 2)
