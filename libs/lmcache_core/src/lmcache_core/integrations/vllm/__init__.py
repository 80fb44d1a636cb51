"""The KV connector for vLLM 0.27.1 and later.

How to use it: `docs/vllm.md`.

| file | concern |
|---|---|
| `connector.py` | vLLM's interface: hands each call to one of the two sides |
| `scheduler.py` | the scheduler's side |
| `requests.py`, `offers.py` | what it knows of a request: its chunks' names, what can be loaded |
| `planned_stores.py` | what is to be stored, and from which blocks |
| `worker.py`, `loads.py`, `memory.py` | a worker's side: between vLLM's blocks and the store |
| `plan.py` | what the two sides tell each other |
| `identity.py`, `groups.py` | what the KV is |
| `adapters.py`, `weights.py`, `file_digests.py` | which weights made it |
| `options.py`, `stores.py` | configuration, and the chunk store behind it |
| `stats.py` | figures, and where hits came from |
| `bundled.py` | packages that come along where vLLM's Python lacks them |

Only `connector.py` and `stats.py` import vLLM, so that the rest can be tested without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmcache_core.integrations.vllm.bundled import append_missing

if TYPE_CHECKING:
    from lmcache_core.integrations.vllm.connector import LMCacheConnector

__all__ = ["LMCacheConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        append_missing()
        return getattr(importlib.import_module(f"{__name__}.connector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
