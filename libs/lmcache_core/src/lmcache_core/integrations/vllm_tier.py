"""A secondary tier behind vLLM's own KV offloading: what vLLM names in `--kv-transfer-config`
(`docs/vllm.md`).

Source: `vllm/v1/kv_offload/tiering/base.py` of vLLM 0.31 to 0.33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache_core.integrations.vllm import append_missing
from lmcache_core.integrations.vllm.fitting import fitting_connector
from lmcache_core.integrations.vllm.releases import LEAST_WITH_TIERS

if TYPE_CHECKING:
    from lmcache_core.integrations.vllm.tier import LMCacheOffloadingConnector, LMCacheTier

__all__ = ["LMCacheOffloadingConnector", "LMCacheTier"]


def __getattr__(name: str) -> Any:
    if name == "LMCacheOffloadingConnector":
        append_missing()
        return fitting_connector("lmcache_core.integrations.vllm.tier", name, LEAST_WITH_TIERS)
    if name in __all__:
        append_missing()
        from lmcache_core.integrations.vllm import tier

        return getattr(tier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
