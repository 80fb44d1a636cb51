"""Hugging Face transformers: a causal LM whose prompts' KV comes from, and goes to, the cache.

engine = LMCacheEngineBuilder.get_or_create("hf", config, metadata_of(model, name, config),
connector_of(model)) cached = CachedCausalLM(model, engine) answer = cached.generate(input_ids,
max_new_tokens=32)
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
