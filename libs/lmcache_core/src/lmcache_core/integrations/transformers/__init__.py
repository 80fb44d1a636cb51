"""Hugging Face transformers: a causal LM that loads its prompts' KV from the cache and stores it.

metadata = metadata_of(model, name, config)
engine = LMCacheEngineBuilder.get_or_create("hf", config, metadata, connector_of(model))
cached = CachedCausalLM(model, engine)
answer = cached.generate(input_ids, max_new_tokens=32)
"""

from lmcache_core.extras import needs_extra

with needs_extra("transformers", "transformers", "torch", "numpy", "lmcache_kernels"):
    from lmcache_core.integrations.transformers.cached import CachedCausalLM, Generation
    from lmcache_core.integrations.transformers.identity import (
        connector_of,
        metadata_of,
        options_fingerprint,
        weights_fingerprint,
    )

__all__ = [
    "CachedCausalLM",
    "Generation",
    "connector_of",
    "metadata_of",
    "options_fingerprint",
    "weights_fingerprint",
]
