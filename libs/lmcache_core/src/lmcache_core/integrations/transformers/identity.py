"""Describes the KV of a Hugging Face model: its identity, its shape, and the connector that copies
it.
"""

from __future__ import annotations

import json

import torch
import xxhash
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory.views import bytes_under

FMT = "huggingface"
_NOT_OF_THE_KV = frozenset(
    {
        *("_name_or_path", "transformers_version", "architectures", "use_cache", "return_dict"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
        *("output_attentions", "output_hidden_states", "task_specific_params", "problem_type"),
    }
)
"""Options of a model that do not affect its KV; all others are part of the identity."""


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return text that differs if any weight differs: the revision of a model without one. Reads
    all weights once.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name};{tensor.dtype};{tuple(tensor.shape)};".encode())
        digest.update(bytes_under(tensor.detach().cpu().contiguous()))
    return f"weights-{digest.hexdigest()}"


def options_fingerprint(model: PreTrainedModel) -> str:
    """Return text that differs if the same weights would give other KV: position encoding,
    activation, attention, norm.
    """
    options = {
        name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_THE_KV
    }
    options["attention"] = getattr(model.config, "_attn_implementation", None)
    # Buffers that belong to the code, not to the weights, but were cast with them: a model loaded
    # in bfloat16 rotates by float32 frequencies, one that was cast to it by rounded ones.
    stored = model.state_dict().keys()
    rounded = sorted(
        f"{name};{buffer.dtype}"
        for name, buffer in model.named_buffers()
        if name not in stored and buffer.dtype.is_floating_point and buffer.dtype != torch.float32
    )
    if rounded:
        options["rounded_buffers"] = rounded
    text = json.dumps(options, sort_keys=True, default=str)
    return f"options-{xxhash.xxh3_128_hexdigest(text.encode())}"


def metadata_of(
    model: PreTrainedModel,
    model_name: str,
    config: LMCacheEngineConfig,
    revision: str | None = None,
) -> LMCacheEngineMetadata:
    """Describe the KV of a model.

    Args:
        model: A causal LM with rotary attention, on one device.
        model_name: Name under which its KV is shared.
        config: Provides the chunk size.
        revision: Revision of the weights; by default their fingerprint, so that other weights never
            share KV. Options of the model that affect its KV are always included.

    Raises:
        ValueError: Not every layer keeps the KV of every token (sliding window, state space): such
            a model is not supported.
    """
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if not kinds <= {DynamicLayer}:
        raise ValueError(
            f"model {model_name!r} has layers that do not keep the KV of every token; only full"
            " attention is supported"
        )
    num_layers, num_heads, head_size = kv_shape_of(model)
    shape = num_layers, 2, config.chunk_size, num_heads, head_size
    identity = f"{revision or weights_fingerprint(model)};{options_fingerprint(model)}"
    return LMCacheEngineMetadata(model_name, 1, 0, FMT, model.dtype, shape, revision=identity)


def connector_of(model: PreTrainedModel) -> VLLMNestedTupleGPUConnector:
    """Return the GPU connector for a model's KV."""
    num_layers, num_heads, head_size = kv_shape_of(model)
    return VLLMNestedTupleGPUConnector(num_heads * head_size, num_layers)


def kv_shape_of(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return the number of layers that keep KV, of their KV heads, and the size of a head."""
    config = model.config
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers), int(num_heads), int(head_size)
