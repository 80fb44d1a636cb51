"""The radix token database: the same keys as the chunked one, without hashing known prefixes
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core._typing import override
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database.base import MultimodalSpan
from lmcache_core.token_database.chunked import ChunkedTokenDatabase
from lmcache_core.token_database.hashing import (
    TOKEN_BYTES,
    chain_hashes,
    extras_of_chunks,
    named_chunks,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEFAULT_MAX_TOKENS = 1 << 22

Tree = dict[tuple[bytes, bytes], tuple[bytes, CacheEngineKey]]
"""The hash and the key of each known chunk, found by the hash before it (of a first chunk, the
root) and by the chunk's block: its tokens and, with multimodal contents, a SHA-256 of its extras.
"""


class RadixTokenDatabase(ChunkedTokenDatabase):
    """Names chunks exactly like `ChunkedTokenDatabase`, but compares the tokens of a known prefix
    instead of hashing them.

    The full chunks of every sequence are kept in a tree. The rest of a sequence after its longest
    known prefix is hashed and added to the tree; a last, partial chunk is hashed every time. A
    chunk takes `4 * chunk_size` bytes for its tokens and some 300 more.

    Args:
        config: Provides chunk size and salt.
        metadata: Provides the identity of the KV.
        max_tokens: Bound on the tokens in the tree; a tree that is full is begun again.

    Raises:
        ValueError: The bound is below one chunk.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        if max_tokens < config.chunk_size:
            raise ValueError(
                f"max_tokens={max_tokens}: must be at least one chunk ({config.chunk_size} tokens)"
            )
        super().__init__(config, metadata)
        self._max_chunks = max_tokens // config.chunk_size
        self._tree: Tree = {}

    @override
    def _named(
        self, root: bytes, ids: npt.NDArray[np.uint32], spans: Sequence[MultimodalSpan]
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        # Chunks of another root have another hash before them, so one tree serves all roots.
        blocks, before, size, tree = self._blocks(ids, spans), root, self.chunk_size, self._tree
        num_known = 0
        for block in blocks:
            known = tree.get((before, block))
            if known is None:
                break
            before, key = known
            yield num_known * size, (num_known + 1) * size, key
            num_known += 1
        rest = chain_hashes(before, ids, size, spans, num_known * size)
        for start, end, key in named_chunks(self._metadata, rest):
            digest = key.hash_bytes()
            assert digest is not None, "a digest has 32 bytes"
            if end - start == size:
                if len(self._tree) >= self._max_chunks:
                    self._tree = {}
                self._tree[before, blocks[start // size]] = digest, key
            yield start, end, key
            before = digest

    def _blocks(self, ids: npt.NDArray[np.uint32], spans: Sequence[MultimodalSpan]) -> list[bytes]:
        """Return what identifies each full chunk, given those before it."""
        num_bytes = self.chunk_size * TOKEN_BYTES
        data = ids.tobytes()
        blocks = [
            data[at : at + num_bytes] for at in range(0, len(data) - num_bytes + 1, num_bytes)
        ]
        for start, extras in extras_of_chunks(
            spans, len(blocks) * self.chunk_size, self.chunk_size
        ).items():
            blocks[start // self.chunk_size] += hashlib.sha256(extras).digest()
        return blocks
