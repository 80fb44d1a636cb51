"""The chunked token database: fixed-size chunks, each named by a hash of itself and everything
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database.base import MultimodalSpan, TokenDatabase
from lmcache_core.token_database.hashing import (
    chain_hashes,
    identity_root,
    named_chunks,
    tokens_as_uint32,
)
from lmcache_core.token_database.masks import num_masked_tokens

if TYPE_CHECKING:
    import torch


class ChunkedTokenDatabase(TokenDatabase):
    """Cuts tokens into chunks of `config.chunk_size` and names each by the chain hash. Keeps
    nothing between calls.

    Args:
        config: Gives chunk size and salt.
        metadata: Gives the identity of the KV.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata) -> None:
        self.chunk_size = config.chunk_size
        self._metadata = metadata
        self._root = identity_root(metadata, config.salt)

    def process_tokens(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """See `TokenDatabase.process_tokens`. Arguments are checked at once, chunks are hashed
        as they are taken.
        """
        ids = tokens_as_uint32(tokens)
        num_skipped = num_masked_tokens(mask, len(ids), self.chunk_size)
        chain = chain_hashes(self._root, ids, self.chunk_size, spans)
        return named_chunks(self._metadata, islice(chain, num_skipped // self.chunk_size, None))

    def use_salt(self, salt: str) -> None:
        """See `TokenDatabase.use_salt`."""
        self._root = identity_root(self._metadata, salt)
