"""The names that cross a trust boundary: tenants and instances. Both are safe in a path, a log
line and a metric label.
"""

from __future__ import annotations

import re
from typing import Final

TENANT_PATTERN: Final = r"[a-z0-9][a-z0-9._-]{0,62}"
INSTANCE_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"

_TENANT = re.compile(TENANT_PATTERN)
_INSTANCE = re.compile(INSTANCE_PATTERN)


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
