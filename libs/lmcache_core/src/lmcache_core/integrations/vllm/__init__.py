"""The KV connector for vLLM (the least release: `releases.py`).

How to use it: `docs/vllm.md`.

| file | concern |
|---|---|
| `connector.py` | vLLM's interface: hands each call to one of the two sides |
| `scheduler.py` | the scheduler's side: what a request can load |
| `planned_stores.py` | what each step stores, and from which blocks |
| `requests.py` | a request: its chunks' names, its blocks |
| `plan.py` | what the two sides send each other |
| `worker.py`, `memory.py` | a worker's side: between vLLM's blocks and the store |
| `store_threads.py` | when stores run, and when their blocks may be overwritten |
| `identity.py`, `groups.py` | what the KV is |
| `kv_settings.py` | which settings make it other KV |
| `adapters.py` | which LoRA adapter made it |
| `tier.py` | the sidecar behind vLLM's own offloading |
| `options.py`, `stores.py` | configuration, and the chunk store that it names |
| `stats.py` | figures, and where hits came from |
| `releases.py`, `fitting.py`, `idle.py` | what happens in a vLLM that the connector does not fit |

Only `connector.py`, `stats.py`, `tier.py`, `fitting.py` and `idle.py` import vLLM, so that the rest
can be tested without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmcache_core.integrations.vllm.fitting import fitting_connector
from lmcache_core.integrations.vllm.releases import LEAST

if TYPE_CHECKING:
    from lmcache_core.integrations.vllm.connector import LMCacheConnector

__all__ = ["LMCacheConnector"]

BUNDLED: Final = Path(__file__).parents[2] / "bundled"
"""Packages for Pythons that lack them, in a folder per Python tag. `docker/payload.Dockerfile` adds
them to the copy of this package that goes into a pod; they exist nowhere else.
"""


def __getattr__(name: str) -> Any:
    if name in __all__:
        append_missing()
        return fitting_connector(f"{__name__}.connector", name, LEAST)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def append_missing(folder: Path = BUNDLED) -> bool:
    """Append the bundled msgspec and xxhash to the search path if this Python lacks one of them:
    vLLM's images contain torch, numpy and msgspec, but not always xxhash. Installed packages take
    precedence.

    Returns:
        Whether the search path has changed: False if nothing is missing, if nothing is bundled for
            this Python, and on repeated calls.
    """
    # The Python tag as in wheel names: `cp312`, and `cp313t` without a GIL.
    place = folder / f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    has_all = all(importlib.util.find_spec(name) is not None for name in ("msgspec", "xxhash"))
    if has_all or not place.is_dir() or str(place) in sys.path:
        return False
    sys.path.append(str(place))
    importlib.invalidate_caches()
    return True
