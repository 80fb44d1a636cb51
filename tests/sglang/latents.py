"""Our linker, for latent attention on a processor: SGLang's backend there would compute prompts
without a prefix from keys that a pool of latents does not have. The other way is right for all.
"""

from __future__ import annotations

from typing import Any

from lmcache_core.integrations.sglang.linker import LMCacheLinker
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

__all__ = ["LMCacheLinker"]


def _latent(*_: Any) -> AttnForwardMethod:
    return AttnForwardMethod.MLA


AttentionBackendRegistry.register("torch_native", _latent)
