"""The models that can be blended: those whose layers are known here. Any other is refused by
name.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmcache_core.blend import RopeParameters

BLENDED_ARCHITECTURES: Final = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Each is compared with transformers' own prefill by a test. Others may look the same, yet scale,
normalize or mask differently.
"""
_KNOWN_ATTENTION: Final = (
    *("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
)
"""All of them compute softmax(QK) V, up to rounding."""
_SAME_FREQUENCY: Final = 1e-5
"""Relative tolerance: the rounding of float32, far below that of a shorter dtype."""


def rope_parameters_of(config: Any) -> RopeParameters:
    """Return how a model rotates, from its configuration.

    Raises:
        ValueError: It rotates in an unknown way.
    """
    options = dict(config.rope_parameters)
    head_size = getattr(config, "head_dim", None)
    head_size = int(head_size or config.hidden_size // config.num_attention_heads)
    share = options.get("partial_rotary_factor", 1.0)
    kind = options.get("rope_type", "default")
    names = (
        *("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
        *("truncate", "low_freq_factor", "high_freq_factor"),
    )
    known = {name: options[name] for name in names if options.get(name) is not None}
    return RopeParameters(
        head_size,
        float(options["rope_theta"]),
        int(head_size * share),
        kind,
        max_positions=int(config.max_position_embeddings),
        original_max_positions=options.get("original_max_position_embeddings"),
        **known,
    )


def reason_against_layers(model: PreTrainedModel) -> str | None:
    """Return why a model's layers cannot be computed here; None if they can."""
    name = type(model).__name__
    kind = name.removesuffix("ForCausalLM")
    module = f"transformers.models.{kind.lower()}.modeling_{kind.lower()}"
    if kind not in BLENDED_ARCHITECTURES or type(model).__module__ != module:
        return (
            f"{name} is not one of the architectures that can be blended:"
            f" {', '.join(BLENDED_ARCHITECTURES)}"
        )
    expected = {(module, f"{kind}DecoderLayer"), (module, f"{kind}Attention")}
    layers = [one for layer in model.model.layers for one in (layer, layer.self_attn)]
    changed = {
        type(one).__qualname__
        for one in layers
        if (type(one).__module__, type(one).__qualname__) not in expected
    }
    if changed:
        return (
            f"layers of this {name} were replaced by {', '.join(sorted(changed))}, which are not"
            " known here"
        )
    if not {type(layer) for layer in DynamicCache(config=model.config).layers} <= {DynamicLayer}:
        return (
            f"layers of this {name} do not see every token (sliding window); only full attention is"
            " blended"
        )
    attention = model.config._attn_implementation
    if attention not in _KNOWN_ATTENTION:
        return (
            f"attention {attention!r} may compute something else; load the model with one of"
            f" {', '.join(_KNOWN_ATTENTION)}"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1:
        return f"the model lies on {', '.join(devices)}; it is blended on one device only"
    return None


def reason_against_rotation(model: PreTrainedModel) -> str | None:
    """Return why cached K cannot be moved according to the rotation of a model with known
    architecture; None if it can.
    """
    try:
        parameters = rope_parameters_of(model.config)
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        return f"the rotation of the model is unknown: {exc}"
    if parameters.kind == "dynamic":
        return (
            "the model rotates by the length of each prompt, and a chunk does not tell that of"
            " its own"
        )
    own, ours = model.model.rotary_emb, parameters.frequencies()
    theirs, scale = own.inv_freq.detach().cpu().float(), parameters.scale
    if (
        theirs.shape == ours.shape
        and torch.allclose(theirs, ours, rtol=_SAME_FREQUENCY, atol=0)
        and abs(own.attention_scaling - scale) <= _SAME_FREQUENCY * scale
    ):
        return None
    return (
        "the model rotates by other frequencies than its configuration says; one that was cast"
        " after it was made does so: give the dtype where it is loaded"
    )
