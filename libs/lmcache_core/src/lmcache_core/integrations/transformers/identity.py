"""Describes the KV of a Hugging Face model for an engine: its identity, its shape, and the
connector that copies it.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.integrations.transformers.measured import MeasuredKV
from lmcache_core.integrations.transformers.watched import KnownModel, WatchedModel

FMT = "huggingface"


def metadata_of(
    model: PreTrainedModel,
    model_name: str,
    config: LMCacheEngineConfig,
    revision: str | None = None,
) -> LMCacheEngineMetadata:
    """Describe the KV of a model, after running it on a few tokens.

    Args:
        model: A causal LM in eval mode, on one device; not changed.
        model_name: Name under which its KV is shared.
        config: Provides the chunk size.
        revision: Revision of the weights; by default their fingerprint, so that other weights never
            share KV. Options and state of the model that affect its KV are always included.

    Raises:
        ValueError: Its KV cannot be cached: it depends on later tokens, or on the length of the
            prompt; not every layer keeps that of every token (sliding window, state space); the
            model is in train mode, has hooks, or cannot be run or read. The message says what was
            found.
    """
    return described(WatchedModel(model, model_name, revision).known(), model_name, config)


def described(
    known: KnownModel, model_name: str, config: LMCacheEngineConfig
) -> LMCacheEngineMetadata:
    """Describe the KV of a model that was looked at."""
    kv = known.kv
    shape = kv.num_layers, 2, config.chunk_size, *kv.chunk_heads
    return LMCacheEngineMetadata(
        model_name, 1, 0, FMT, kv.dtype, shape, revision=known.revision, layout=kv.layout
    )


def connector_of(model: PreTrainedModel) -> VLLMNestedTupleGPUConnector:
    """Return the GPU connector for a model's KV, after running it on a few tokens.

    Raises:
        ValueError: Its KV cannot be cached.
    """
    return connector_for(WatchedModel(model, type(model).__name__).shape())


def connector_for(kv: MeasuredKV) -> VLLMNestedTupleGPUConnector:
    """Return the GPU connector for measured KV."""
    heads, size = kv.chunk_heads
    return VLLMNestedTupleGPUConnector(heads * size, kv.num_layers)
