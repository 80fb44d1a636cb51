"""The environment of the demo and of its processes."""

from __future__ import annotations

import os
import shutil


def quiet_environment(**extra: str) -> dict[str, str]:
    """Return the environment for children: this process's, without options of a cache that may
    be installed here, offline.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    return (
        kept
        | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        | extra
    )


def find_redis_server() -> str | None:
    """Return the path of a redis-server on this machine, or None."""
    return shutil.which("redis-server") or shutil.which("valkey-server")
