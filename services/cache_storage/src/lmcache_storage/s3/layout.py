"""Names of objects in the bucket.

`<prefix><tenant>/<2 hex>/<64 hex>.kvr`, one record each; the 64 digits are the SHA-256 of its
canonical key, as in the names of the disk
tier: no name tells a model or a token, all have the same length, and they are spread evenly.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.disk.layout import record_name

_RECORD = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}\.kvr")
_TENANT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*/")


def object_name(prefix: str, key: ChunkKey) -> str:
    """The object of a chunk."""
    name = record_name(key.key)
    return f"{prefix}{tenant_name(key.tenant)}/{name[:2]}/{name}"


def tenant_name(tenant: str) -> str:
    """A tenant's part of names: each tenant has one of its own, which holds no `/`, is never `.`
    or `..`, and needs no quoting in URLs.
    """
    name = quote(tenant, safe="").replace("~", "%7E").replace("%", "=")
    return "=2E" + name[1:] if name.startswith(".") else name


def is_record(name: str, prefix: str, tenant: str | None) -> bool:
    """Whether an object of that name claims to be a record of that tenant, of any when None:
    nothing else is ever removed.
    """
    if not name.startswith(prefix):
        return False
    rest = name[len(prefix) :]
    beginning = _TENANT.match(rest)
    if beginning is None or (tenant is not None and beginning[0] != tenant_name(tenant) + "/"):
        return False
    return _RECORD.fullmatch(rest, beginning.end()) is not None
