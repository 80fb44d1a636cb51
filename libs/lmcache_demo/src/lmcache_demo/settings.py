"""The environment of the demo's processes."""

from __future__ import annotations

import os


def quiet_environment(**extra: str) -> dict[str, str]:
    """Return the environment for children: this process's, without options of a cache that may
    be installed here, offline.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return kept | offline | extra
