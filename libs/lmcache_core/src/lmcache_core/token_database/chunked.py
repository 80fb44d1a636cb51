"""The chunked token database: fixed-size chunks, each named by a hash of itself and everything before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database.base import MultimodalSpan, TokenDatabase
from lmcache_core.token_database.hashing import chain_hashes, identity_root, tokens_as_uint32

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class ChunkedTokenDatabase(TokenDatabase):
    """Cuts tokens into chunks of `config.chunk_size` and names each by the chain hash.

    Args:
        config: Gives chunk size and salt.
        metadata: Gives the identity of the KV.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata) -> None:
        self.chunk_size = config.chunk_size
        self._metadata = metadata
        self._root = identity_root(metadata, config.salt)

    def process_tokens(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, spans: Sequence[MultimodalSpan] = ()
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """See `TokenDatabase.process_tokens`."""
        ids = tokens_as_uint32(tokens)
        num_skipped = num_masked_tokens(mask, len(ids), self.chunk_size)
        return self._named_chunks(ids, num_skipped, spans)

    def use_salt(self, salt: str) -> None:
        """See `TokenDatabase.use_salt`."""
        self._root = identity_root(self._metadata, salt)

    def _named_chunks(
        self, ids: npt.NDArray[np.uint32], num_skipped: int, spans: Sequence[MultimodalSpan]
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        meta = self._metadata
        for start, end, digest in chain_hashes(self._root, ids, self.chunk_size, spans):
            if start >= num_skipped:
                yield start, end, CacheEngineKey(meta.fmt, meta.model_name, meta.world_size, meta.worker_id, digest.hex())


def num_masked_tokens(mask: torch.Tensor | None, num_tokens: int, chunk_size: int) -> int:
    """Number of Falses at the front of the mask.

    Raises:
        ValueError: Wrong length or dtype, a False behind a True, or the number of Falses is no multiple of the chunk size.
    """
    if mask is None:
        return 0
    flags = np.asarray(mask)
    if flags.shape != (num_tokens,) or flags.dtype != np.bool_:
        raise ValueError(f"the mask must be {num_tokens} booleans, not shape {flags.shape} of {flags.dtype}")
    num_false = int(num_tokens - flags.sum())
    if num_false and flags[:num_false].any():
        raise ValueError("the mask must be Falses followed by Trues (FFF…TTT)")
    if num_false % chunk_size:
        raise ValueError(f"the number of Falses in the mask ({num_false}) is not a multiple of the chunk size ({chunk_size})")
    return num_false
