"""What a Hugging Face model's KV is: its identity, its shape, and the connector that copies it."""

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
        "_name_or_path",
        "transformers_version",
        "architectures",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
    }
    | {
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "task_specific_params",
        "problem_type",
    }
)
"""Options of a model that change none of its KV, by name; whatever else there is takes part in
the identity.
"""


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Text that differs when any weight differs: the revision of a model that names none. Reads
    all weights once.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name};{tensor.dtype};{tuple(tensor.shape)};".encode())
        digest.update(bytes_under(tensor.detach().cpu().contiguous()))
    return f"weights-{digest.hexdigest()}"


def options_fingerprint(model: PreTrainedModel) -> str:
    """Text that differs when the same weights would give other KV: position encoding,
    activation, attention, norm.
    """
    options = {
        name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_THE_KV
    }
    options["attention"] = getattr(model.config, "_attn_implementation", None)
    rounded = _rounded_buffers(model)
    if rounded:
        options["rounded_buffers"] = rounded
    text = json.dumps(options, sort_keys=True, default=str)
    return f"options-{xxhash.xxh3_128_hexdigest(text.encode())}"


def _rounded_buffers(model: PreTrainedModel) -> list[str]:
    """Buffers that belong to the code, not to the weights, and were cast with these: a model that
    was loaded in bfloat16 rotates by float32 frequencies, and one that was cast to it by rounded
    ones, which is other KV of the same weights.
    """
    stored = model.state_dict().keys()
    own = ((name, buffer.dtype) for name, buffer in model.named_buffers() if name not in stored)
    return sorted(
        f"{name};{dtype}"
        for name, dtype in own
        if dtype.is_floating_point and dtype != torch.float32
    )


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
        config: Gives the chunk size.
        revision: Revision of the weights; by default their fingerprint, so that other weights never
            share KV. The model's options, which decide about its KV too, always take part.

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
    shape = (
        num_layers_of(model),
        2,
        config.chunk_size,
        num_kv_heads_of(model),
        head_size_of(model),
    )
    identity = f"{revision or weights_fingerprint(model)};{options_fingerprint(model)}"
    return LMCacheEngineMetadata(model_name, 1, 0, FMT, model.dtype, shape, revision=identity)


def connector_of(model: PreTrainedModel) -> VLLMNestedTupleGPUConnector:
    """The GPU connector for a model's KV."""
    return VLLMNestedTupleGPUConnector(
        num_kv_heads_of(model) * head_size_of(model), num_layers_of(model)
    )


def num_layers_of(model: PreTrainedModel) -> int:
    """How many layers keep KV."""
    return int(model.config.num_hidden_layers)


def num_kv_heads_of(model: PreTrainedModel) -> int:
    """Heads of keys and values."""
    return int(
        getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    )


def head_size_of(model: PreTrainedModel) -> int:
    """Dimensions of a head."""
    head_size = getattr(model.config, "head_dim", None)
    return int(head_size or model.config.hidden_size // model.config.num_attention_heads)
