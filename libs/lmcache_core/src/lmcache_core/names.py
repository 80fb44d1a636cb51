"""Names that processes share: of tenants, instances and tiers. The first two cross a trust
boundary: they are safe in a path, a log line and a metric label.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

MEMORY_TIER: Final = "memory"
DISK_TIER: Final = "disk"
PEER_TIER: Final = "peers"
STORAGE_TIER: Final = "storage"
BUCKET_TIER: Final = "bucket"
DOCUMENTED_TIERS: Final = MappingProxyType(
    {
        "Hot": MEMORY_TIER,
        "LocalDiskBackend": DISK_TIER,
        "P2PBackend": PEER_TIER,
        "RemoteBackend": STORAGE_TIER,
    }
)
"""Tiers by LMCache's names, as its documented calls and the sidecar's socket name them."""
KNOWN_TIERS: Final = frozenset(
    {
        MEMORY_TIER,
        DISK_TIER,
        PEER_TIER,
        STORAGE_TIER,
        BUCKET_TIER,
        *DOCUMENTED_TIERS,
        *(name.lower() for name in DOCUMENTED_TIERS),
    }
)
"""All names of tiers that an instance may report: each takes room in the index for each chunk."""
_DOCUMENTED_NAMES: Final = MappingProxyType({ours: name for name, ours in DOCUMENTED_TIERS.items()})

TENANT_PATTERN: Final = r"[a-z0-9][a-z0-9._-]{0,62}"
INSTANCE_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"

_TENANT = re.compile(TENANT_PATTERN)
_INSTANCE = re.compile(INSTANCE_PATTERN)


def tier_name(name: str) -> str:
    """Return our name of a tier with LMCache's name; other names unchanged."""
    return DOCUMENTED_TIERS.get(name, name)


def documented_tier(name: str) -> str:
    """Return LMCache's name of a tier with our name; other names unchanged."""
    return _DOCUMENTED_NAMES.get(name, name)


def validate_tenant(name: str) -> str:
    """Return `name` unchanged.

    Raises:
        ValueError: It is not a tenant's name.
    """
    if _TENANT.fullmatch(name) is None:
        raise ValueError(f"a tenant's name matches {TENANT_PATTERN}")
    return name


def validate_instance_id(name: str) -> str:
    """Return `name` unchanged.

    Raises:
        ValueError: It is not an instance's id.
    """
    if _INSTANCE.fullmatch(name) is None:
        raise ValueError(f"an instance's id matches {INSTANCE_PATTERN}")
    return name
