"""The documented names of backends, and the tiers that each of them selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_core.config.options import shown
from lmcache_core.config.sources import DEFAULT_DISK_GB
from lmcache_core.errors import ConfigError

LEGACY_BACKENDS = (
    "cpu",
    "local_disk",
    "local_cpu_disk",
    "remote",
    "local_cpu_remote",
    "local_disk_remote",
    "local_cpu_disk_remote",
)
DEFAULT_DISK_PATH = "file:///var/lib/lmcache/disk"
_DECIDED = ("local_cpu", "local_disk")


def tiers_of(backend: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a backend determines.

    Args:
        backend: One of `LEGACY_BACKENDS`.
        values: The other options, by name.

    Raises:
        ConfigError: The backend is unknown, or an option is given that the backend determines.
    """
    if backend not in LEGACY_BACKENDS:
        raise ConfigError(f"backend={backend!r}: must be one of {', '.join(LEGACY_BACKENDS)}")
    for name in _DECIDED:
        if name in values:
            raise ConfigError(
                f"{name}={shown(values[name])}: determined by backend={backend!r}; leave it out or"
                " use from_defaults"
            )
    uses_disk = "disk" in backend
    return {
        "local_cpu": "cpu" in backend,
        "local_disk": DEFAULT_DISK_PATH if uses_disk else None,
        "max_local_disk_size": (
            values["max_local_disk_size"] or (DEFAULT_DISK_GB if uses_disk else 0.0)
        ),
        "remote_url": values["remote_url"] if "remote" in backend else None,
    }
