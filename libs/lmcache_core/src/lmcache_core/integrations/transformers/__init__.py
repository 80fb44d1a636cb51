"""Hugging Face transformers: a causal LM that loads its prompts' KV from the cache and stores it.

    with open(model) as cache:  # also lmcache_core.open
        answer = cache.generate(input_ids, max_new_tokens=64)

`CachedCausalLM` takes an existing engine.
"""

from lmcache_core.extras import needs_extra

with needs_extra("transformers"):
    from lmcache_core.integrations.transformers.cached import CachedCausalLM, Generation
    from lmcache_core.integrations.transformers.front_door import open
    from lmcache_core.integrations.transformers.identity import (
        connector_of,
        metadata_of,
    )
    from lmcache_core.integrations.transformers.watched import (
        options_fingerprint,
        state_fingerprint,
        weights_fingerprint,
    )

__all__ = [
    "CachedCausalLM",
    "Generation",
    "connector_of",
    "metadata_of",
    "open",
    "options_fingerprint",
    "state_fingerprint",
    "weights_fingerprint",
]
