"""The radix token database: the keys of the chunked one, without hashing again what has been
seen before.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from lmcache_core._typing import override
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.documented.radix_tree import RadixTree
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database.base import MultimodalSpan, TokenDatabase
from lmcache_core.token_database.chunked import num_masked_tokens
from lmcache_core.token_database.hashing import (
    TOKEN_BYTES,
    chain_hashes,
    extras_of_chunks,
    identity_root,
    named_chunks,
    tokens_as_uint32,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

DEFAULT_MAX_TOKENS = 1 << 22


class _Memory:
    """What is known under one identity root. A new root is a new memory, so that keys of two
    roots cannot meet in one tree.
    """

    def __init__(self, root: bytes, max_chunks: int) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.tree: RadixTree[CacheEngineKey] = RadixTree(max_chunks)


class RadixTokenDatabase(TokenDatabase):
    """Names chunks exactly as `ChunkedTokenDatabase` does, but compares the tokens of a prefix that
    it knows instead of hashing them.

    The full chunks of every sequence are kept in a radix tree, together with their keys. What is
    left of a sequence after its longest known prefix is hashed and put into the tree; a last,
    partial chunk is hashed every time. The tree is an index of what has been *named*, not of what
    is *cached*. Multimodal contents take part: a chunk that spans overlap is known by its tokens
    and a SHA-256 of its extras.

    A chunk takes `4 * chunk_size` bytes for its tokens and about 240 for its key, and a place where
    sequences part about 600: at the default bound and with chunks of 256 tokens about 20 MiB in
    all, 30 if no two chunks in a row were used together.

    Args:
        config: Gives chunk size and salt.
        metadata: Gives the identity of the KV.
        max_tokens: Bound on the tokens in the tree; those used longest ago go first, from the ends
            of their sequences.

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
        self.chunk_size = config.chunk_size
        self._metadata = metadata
        self._max_chunks = max_tokens // config.chunk_size
        self._memory = _Memory(identity_root(metadata, config.salt), self._max_chunks)

    @property
    def num_chunks(self) -> int:
        """Chunks in the tree."""
        return self._memory.tree.num_blocks

    @override
    def process_tokens(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """Do all work at once; the result only reads it out."""
        ids = tokens_as_uint32(tokens)
        num_skipped = num_masked_tokens(mask, len(ids), self.chunk_size)
        keys = self._keys(ids, spans)
        starts = range(num_skipped, len(ids), self.chunk_size)
        ends = chain(range(num_skipped + self.chunk_size, len(ids), self.chunk_size), (len(ids),))
        return zip(starts, ends, keys[num_skipped // self.chunk_size :], strict=False)

    def longest_prefix(self, tokens: torch.Tensor, spans: Sequence[MultimodalSpan] = ()) -> int:
        """Return how many tokens, from the first, are known: whole chunks. Does not count as a use.

        Args:
            tokens: As in `process_tokens`.
            spans: As in `process_tokens`.

        Raises:
            ValueError: A token id is negative or above 2^32-1.
        """
        blocks = self._blocks(tokens_as_uint32(tokens), spans)
        memory = self._memory
        with memory.lock:
            return memory.tree.prefix_length(blocks) * self.chunk_size

    @override
    def use_salt(self, salt: str) -> None:
        """Forgets what was named with the salt before."""
        self._memory = _Memory(identity_root(self._metadata, salt), self._max_chunks)

    def clear(self) -> None:
        """Forget all sequences."""
        self._memory = _Memory(self._memory.root, self._max_chunks)

    def check_integrity(self) -> None:
        """Compare the tree with its books.

        Raises:
            IntegrityError: They do not balance.
        """
        memory = self._memory
        with memory.lock:
            memory.tree.check_integrity()

    def _keys(
        self, ids: npt.NDArray[np.uint32], spans: Sequence[MultimodalSpan]
    ) -> list[CacheEngineKey]:
        """Return the keys of all chunks, a last partial one included. Hashing is done without the
        lock.
        """
        memory, blocks = self._memory, self._blocks(ids, spans)
        with memory.lock:
            keys = memory.tree.find(blocks)
        num_known = len(keys)
        if num_known * self.chunk_size < len(ids):
            before = bytes.fromhex(keys[-1].chunk_hash) if keys else memory.root
            hashes = chain_hashes(before, ids, self.chunk_size, spans, num_known * self.chunk_size)
            keys += [key for _, _, key in named_chunks(self._metadata, hashes)]
        if num_known < len(blocks):
            with memory.lock:
                memory.tree.insert(blocks, keys[: len(blocks)])
        return keys

    def _blocks(self, ids: npt.NDArray[np.uint32], spans: Sequence[MultimodalSpan]) -> list[bytes]:
        """Return what makes each full chunk the one it is, given those before it: its tokens, and a
        hash of its extras if it has any.
        """
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
