"""The volumes that are added to a pod."""

from __future__ import annotations

import math
from typing import Any, Final

from lmcache_webhook.injection.options import PodPlan

JOURNAL_MB: Final = 64
"""Beside the arena, on the same volume: its journal."""
PAYLOAD_MB: Final = 256
_READABLE: Final = 0o444
"""Only the sidecar mounts them. Without an fsGroup, which is not ours to set, files of a group
would be unreadable to it.
"""


def volumes_of(plan: PodPlan) -> list[dict[str, Any]]:
    """Every volume that a pod gets. Those in memory count towards the limit of the container
    that fills them, the sidecar.
    """
    arena_mb = math.ceil(plan.arena_gb * 1024) + JOURNAL_MB
    volumes: list[dict[str, Any]] = [
        {"name": "lmcache-arena", "emptyDir": {"medium": "Memory", "sizeLimit": f"{arena_mb}Mi"}},
        {"name": "lmcache-socket", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "lmcache-payload", "emptyDir": {"sizeLimit": f"{PAYLOAD_MB}Mi"}},
        {"name": "lmcache-tmp", "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": "lmcache-no-token", "emptyDir": {"sizeLimit": "1Mi"}},
    ]
    if plan.disk_gb:
        # A tenth and a GiB more than the tier may fill: over the limit Kubernetes evicts the whole
        # pod.
        volumes.append(
            {
                "name": "lmcache-disk",
                "emptyDir": {"sizeLimit": f"{math.ceil(round(plan.disk_gb * 1.1, 6)) + 1}Gi"},
            }
        )
    tenant = plan.tenant
    sources = [
        _secret(tenant.credentials_secret, "tokens.yaml", "sidecar-token"),
        _secret(tenant.keys_secret, "ticket-keys", "salt"),
    ]
    credentials = [source for source in sources if source is not None]
    if credentials:
        volumes.append(
            {
                "name": "lmcache-credentials",
                "projected": {"defaultMode": _READABLE, "sources": credentials},
            }
        )
    tls = _secret(tenant.tls_secret, "tls.crt", "tls.key", "ca.crt")
    if tls is not None:
        volumes.append(
            {"name": "lmcache-tls", "projected": {"defaultMode": _READABLE, "sources": [tls]}}
        )
    return volumes


def _secret(name: str | None, *keys: str) -> dict[str, Any] | None:
    return (
        None
        if name is None
        else {"secret": {"name": name, "items": [{"key": key, "path": key} for key in keys]}}
    )
