"""The KV connector for vLLM 0.27.1 and later.

How to use it: `docs/vllm.md`.

| file | concern |
|---|---|
| `connector.py` | vLLM's interface: hands each call to one of the two sides |
| `scheduler.py`, `requests.py`, `offers.py`, `naming.py`, `names.py` | the scheduler's side: what a request can load, and its name |
| `planned_stores.py` | the scheduler's side: what is to be stored |
| `worker.py`, `loads.py`, `memory.py` | a worker's side: vLLM's blocks to and from the chunk store |
| `plan.py` | what the two sides tell each other |
| `groups.py`, `identity.py`, `weights.py`, `file_digests.py`, `adapters.py`, `contents.py` | what the KV is |
| `options.py`, `stores.py` | configuration, and the chunk store behind it |
| `stats.py`, `sources.py`, `logs.py` | figures, where hits came from, log lines |
| `bundled.py` | packages that come along where vLLM's Python lacks them |

Only `connector.py` and `stats.py` import vLLM, so that the rest can be tested without it.
"""  # noqa: E501

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
