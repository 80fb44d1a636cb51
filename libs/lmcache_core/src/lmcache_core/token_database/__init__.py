"""From tokens to keys: the prefix hash chain."""

from lmcache_core.token_database.base import MultimodalSpan, TokenDatabase
from lmcache_core.token_database.chunked import ChunkedTokenDatabase
from lmcache_core.token_database.hashing import chain_hashes, identity_root
from lmcache_core.token_database.radix import RadixTokenDatabase

__all__ = ["ChunkedTokenDatabase", "MultimodalSpan", "RadixTokenDatabase", "TokenDatabase", "chain_hashes", "identity_root"]
