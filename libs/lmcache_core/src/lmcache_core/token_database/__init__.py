"""From tokens to keys: the prefix hash chain.

The databases, which need numpy, are resolved on first use: a process without it can hash.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.extras import resolve
from lmcache_core.token_database.base import MultimodalSpan, TokenDatabase
from lmcache_core.token_database.hashing import chain_hashes, identity_root

if TYPE_CHECKING:
    from lmcache_core.documented.radix import RadixTokenDatabase
    from lmcache_core.token_database.chunked import ChunkedTokenDatabase

_RESOLVED_LATER = MappingProxyType(
    {"ChunkedTokenDatabase": "token_database.chunked", "RadixTokenDatabase": "documented.radix"}
)

__all__ = [
    "ChunkedTokenDatabase",
    "MultimodalSpan",
    "RadixTokenDatabase",
    "TokenDatabase",
    "chain_hashes",
    "identity_root",
]


def __getattr__(name: str) -> Any:
    return resolve(__name__, _RESOLVED_LATER, name)
