"""Whether a `.docker/config.json` can be given to a cluster as the login for a registry."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.cluster.waiting import ClusterError

DOCKER_HUB = ("docker.io", "index.docker.io")
USABLE = ("auth", "username")
"""What kubelets read of an entry; where a credential helper has the login, it is empty."""


def usable_login(path: Path, images: str) -> str:
    """Return the text of a file with a login.

    Args:
        path: A `.docker/config.json`.
        images: `registry/path:tag`.

    Raises:
        ClusterError: There is no such file, or no login for the registry in it.
    """
    if not path.is_file():
        raise ClusterError(f"PULL_CONFIG={path}: no such file; log in to the registry first")
    text = path.read_text(encoding="utf-8")
    first = images.partition("/")[0]
    # Docker's own rule for what is a host and not a folder of Docker Hub.
    hosts = (first,) if first == "localhost" or set(first) & {".", ":"} else DOCKER_HUB
    try:
        auths: dict[str, dict[str, Any]] = json.loads(text).get("auths", {})
        found = [one for key, one in auths.items() if any(is_for(key, host) for host in hosts)]
        is_usable = any(one.get(name) for one in found for name in USABLE)
    except (ValueError, AttributeError) as exc:
        raise ClusterError(f"PULL_CONFIG={path}: not a .docker/config.json: {exc}") from exc
    if not is_usable:
        raise ClusterError(
            f"PULL_CONFIG={path}: holds no login for {hosts[0]}, which a credential helper may"
            " keep elsewhere: log in with DOCKER_CONFIG set to an empty folder, and name its file"
        )
    return text


def is_for(key: str, host: str) -> bool:
    """Return whether an entry is for a registry; it may have a scheme, a path and wildcards."""
    return fnmatchcase(host, key.rpartition("://")[2].partition("/")[0])
