"""The chunked token database: fixed-size chunks, each named by a hash of itself and everything
before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcache_core._typing import override
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database.base import MultimodalSpan, TokenDatabase
from lmcache_core.token_database.hashing import (
    chain_hashes,
    identity_root,
    named_chunks,
    tokens_as_uint32,
)

if TYPE_CHECKING:
    import torch


class ChunkedTokenDatabase(TokenDatabase):
    """Splits tokens into chunks of `config.chunk_size` and names each by the chain hash. Keeps no
    state between calls.

    Args:
        config: Provides chunk size and salt.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata) -> None:
        self.chunk_size = config.chunk_size
        self._metadata = metadata
        self._salt = config.salt
        self._renaming = threading.Lock()
        self._root = identity_root(metadata, config.salt)

    @override
    def process_tokens(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """Check the arguments immediately, and name each chunk when it is consumed."""
        ids = tokens_as_uint32(tokens)
        num_skipped = num_masked_tokens(mask, len(ids), self.chunk_size)
        # The root is read once: the salt may change concurrently.
        named = self._named(self._root, ids, spans)
        return islice(named, num_skipped // self.chunk_size, None)

    def _named(
        self, root: bytes, ids: npt.NDArray[np.uint32], spans: Sequence[MultimodalSpan]
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """Yield start, end and key of each chunk."""
        return named_chunks(self._metadata, chain_hashes(root, ids, self.chunk_size, spans))

    @override
    def use_salt(self, salt: str) -> None:
        with self._renaming:
            self._salt = salt
            self._root = identity_root(self._metadata, salt)

    @override
    def use_revision(self, revision: str) -> None:
        with self._renaming:
            self._metadata = replace(self._metadata, revision=revision)
            self._root = identity_root(self._metadata, self._salt)


def num_masked_tokens(mask: torch.Tensor | None, num_tokens: int, chunk_size: int) -> int:
    """Return the number of Falses at the front of the mask.

    Args:
        mask: Booleans, shape `[num_tokens]`, or None for no Falses.

    Raises:
        ValueError: Wrong length or dtype, a False after a True, or the number of Falses is no
            multiple of the chunk size.
    """
    if mask is None:
        return 0
    flags = np.asarray(mask)
    if flags.shape != (num_tokens,) or flags.dtype != np.bool_:
        raise ValueError(
            f"the mask must be {num_tokens} booleans, not shape {flags.shape} of {flags.dtype}"
        )
    num_false = num_tokens - int(np.count_nonzero(flags))
    if flags[:num_false].any():
        raise ValueError("the mask must be Falses followed by Trues (FFF…TTT)")
    if num_false % chunk_size:
        raise ValueError(
            f"the number of Falses in the mask ({num_false}) is not a multiple of the chunk size"
            f" ({chunk_size})"
        )
    return num_false
