"""The directory layout of a disk tier.

`<tenant>/<2 hex>/<64 hex>.kvr`  one record; the name is the SHA-256 of its canonical key
`.tmp/*.tmp`                     records being written
`.bad/*.bad`                     records found damaged
`.lock`                          locked by the process that owns the directory
"""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from pathlib import Path
from urllib.parse import quote, unquote

from lmcache_core.keys import CacheEngineKey, ChunkKey

RECORD_SUFFIX = ".kvr"
TEMPORARY_SUFFIX = ".tmp"
BAD_SUFFIX = ".bad"
MAX_NAME_BYTES = 255
BLOCK_BYTES = 4096
"""Files occupy whole blocks of the file system."""
FILE_DEPTH = 3
"""Levels below the root at which a record's file lies."""

_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"[0-9a-f]{64}\.kvr")


def charged_bytes(num_bytes: int) -> int:
    """Return how much of the capacity a file of that size takes."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def record_name(key: CacheEngineKey) -> str:
    """Return the file name of a record."""
    return hashlib.sha256(key.canonical()).hexdigest() + RECORD_SUFFIX


class DiskLayout:
    """Paths below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / ".lock"
        self.temporary = root / ".tmp"
        self.bad = root / ".bad"
        self._start = secrets.token_hex(4)
        self._numbers = itertools.count()

    def record(self, key: ChunkKey) -> Path:
        """Return the file of a chunk.

        Raises:
            ValueError: The tenant's name cannot be a directory name.
        """
        name = record_name(key.key)
        return self.root / tenant_directory(key.tenant) / name[:2] / name

    def find(self, key: ChunkKey) -> Path | None:
        """Return the file of a chunk; None if the tenant's name cannot be a directory name."""
        try:
            return self.record(key)
        except ValueError:
            return None

    def new_temporary(self) -> Path:
        """Return a file name that no other writer uses."""
        return self.temporary / f"{self._start}-{next(self._numbers)}{TEMPORARY_SUFFIX}"

    def new_bad(self) -> Path:
        """Return a new file name for a damaged record."""
        return self.bad / f"{self._start}-{next(self._numbers)}{BAD_SUFFIX}"


def tenant_directory(tenant: str) -> str:
    """Return the directory name of a tenant: percent-encoded, never hidden.

    Raises:
        ValueError: The name is empty or too long.
    """
    name = quote(tenant, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if not 0 < len(name) <= MAX_NAME_BYTES:
        raise ValueError(
            f"tenant of {len(name)} encoded characters: a directory name has 1 to {MAX_NAME_BYTES}"
        )
    return name


def tenant_of(directory: str) -> str | None:
    """Return the tenant that a directory belongs to; None if it is no tenant's directory."""
    tenant = unquote(directory)
    try:
        return tenant if tenant_directory(tenant) == directory else None
    except ValueError:  # empty, too long when encoded, or not UTF-8
        return None


def is_shard(directory: str) -> bool:
    """Return whether a directory of that name holds records."""
    return _SHARD.fullmatch(directory) is not None


def is_record(file_name: str) -> bool:
    """Return whether a file of that name claims to be a record."""
    return _RECORD.fullmatch(file_name) is not None
