"""The external linker for SGLang: `docs/sglang.md`.

| file | concern |
|---|---|
| `linker.py` | SGLang's interface; the only one that imports SGLang |
| `page_cache.py` | finds, holds, loads and stores the pages of a rank |
| `pools.py` | SGLang's tensors |
| `identity.py`, `server_settings.py` | what the KV is |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.integrations.sglang.linker import LMCacheLinker

__all__ = ["LMCacheLinker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lmcache_core.integrations.sglang.linker import LMCacheLinker

        return LMCacheLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
