"""The radix token database: the same keys as the chunked one, without hashing known prefixes
again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from lmcache_core._typing import override
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.errors import IntegrityError
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


class _KnownChunks:
    """The chunks named under one identity root: a trie whose nodes are found by the chunk before
    and the tokens. A new root is a new object, so that keys of two roots cannot meet. Thread-safe.
    """

    def __init__(self, root: bytes, max_chunks: int) -> None:
        self.root = root
        self._max_chunks = max_chunks
        self._lock = threading.Lock()
        # (hash of the previous chunk, block) -> key, least recently used first. A use moves a whole
        # path to the end, last chunk first, so the first entry never has a chunk after it.
        self._keys: OrderedDict[tuple[str, bytes], CacheEngineKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, blocks: Sequence[bytes], is_use: bool = True) -> list[CacheEngineKey]:
        """Return the keys of the longest known prefix."""
        keys: list[CacheEngineKey] = []
        before = ""
        with self._lock:
            known = self._keys.get
            for block in blocks:
                key = known((before, block))
                if key is None:
                    break
                keys.append(key)
                before = key.chunk_hash
            if is_use:
                self._use(blocks, keys)
        return keys

    def add(self, blocks: Sequence[bytes], keys: Sequence[CacheEngineKey]) -> None:
        """Remember a sequence, as far as there is room, and count a use of it."""
        with self._lock:
            self._keys.update(zip(_nodes(blocks, keys), keys, strict=False))
            self._use(blocks, keys)
            while len(self._keys) > self._max_chunks:
                self._keys.popitem(last=False)

    def _use(self, blocks: Sequence[bytes], keys: Sequence[CacheEngineKey]) -> None:
        """Move a path to the end, unless it was the last one used. The lock is held."""
        if keys != list(islice(reversed(self._keys.values()), len(keys))):
            for node in reversed(list(_nodes(blocks, keys))):
                self._keys.move_to_end(node)

    def check_integrity(self) -> None:
        """Raises:
        IntegrityError: A chunk would outlive the one before it, or there are too many.
        """
        with self._lock:
            later = {""}
            for (before, _), key in reversed(self._keys.items()):
                if before not in later:
                    raise IntegrityError(f"{key.chunk_hash}: would outlive the chunk before it")
                later.add(key.chunk_hash)
            if len(self._keys) > self._max_chunks:
                raise IntegrityError(f"{len(self._keys)} chunks; at most {self._max_chunks}")


def _nodes(blocks: Sequence[bytes], keys: Sequence[CacheEngineKey]) -> Iterator[tuple[str, bytes]]:
    """Return the trie keys of each full chunk of a known sequence."""
    befores = chain(("",), (key.chunk_hash for key in keys))
    return zip(befores, blocks[: len(keys)], strict=False)


class RadixTokenDatabase(TokenDatabase):
    """Names chunks exactly like `ChunkedTokenDatabase`, but compares the tokens of a known prefix
    instead of hashing them.

    The full chunks of every sequence are kept in a tree, together with their keys. The rest of a
    sequence after its longest known prefix is hashed and added to the tree; a last, partial chunk
    is hashed every time. The tree is an index of what has been *named*, not of what is *cached*.
    Multimodal contents are included: a chunk that spans overlap is identified by its tokens and a
    SHA-256 of its extras. A chunk takes `4 * chunk_size` bytes for its tokens and some 600 more:
    about 26 MiB in all at the default bound, with chunks of 256 tokens.

    Args:
        config: Provides chunk size and salt.
        metadata: Provides the identity of the KV.
        max_tokens: Bound on the tokens in the tree; those used longest ago are dropped first, from
            the ends of their sequences.

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
        self._salt = config.salt
        self._known = _KnownChunks(identity_root(metadata, config.salt), self._max_chunks)

    @property
    def num_chunks(self) -> int:
        """Return how many chunks the tree holds."""
        return len(self._known)

    @override
    def process_tokens(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """Do all work immediately; iterating over the result only reads it."""
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
        return len(self._known.find(blocks, is_use=False)) * self.chunk_size

    @override
    def use_salt(self, salt: str) -> None:
        """Forget everything named with the previous salt."""
        self._salt = salt
        self._known = _KnownChunks(identity_root(self._metadata, salt), self._max_chunks)

    @override
    def use_revision(self, revision: str) -> None:
        """Forget everything named with the previous revision."""
        self._metadata = replace(self._metadata, revision=revision)
        self._known = _KnownChunks(identity_root(self._metadata, self._salt), self._max_chunks)

    def clear(self) -> None:
        """Forget all sequences."""
        self._known = _KnownChunks(self._known.root, self._max_chunks)

    def check_integrity(self) -> None:
        """Check that every known chunk is found by the ones before it.

        Raises:
            IntegrityError: One is not.
        """
        self._known.check_integrity()

    def _keys(
        self, ids: npt.NDArray[np.uint32], spans: Sequence[MultimodalSpan]
    ) -> list[CacheEngineKey]:
        """Return the keys of all chunks, a last partial one included."""
        # Read once: the salt may change concurrently.
        known, blocks = self._known, self._blocks(ids, spans)
        keys = known.find(blocks)
        num_known = len(keys)
        if num_known * self.chunk_size < len(ids):
            before = bytes.fromhex(keys[-1].chunk_hash) if keys else known.root
            hashes = chain_hashes(before, ids, self.chunk_size, spans, num_known * self.chunk_size)
            keys += [key for _, _, key in named_chunks(self._metadata, hashes)]
        if num_known < len(blocks):
            known.add(blocks, keys)
        return keys

    def _blocks(self, ids: npt.NDArray[np.uint32], spans: Sequence[MultimodalSpan]) -> list[bytes]:
        """Return what identifies each full chunk, given those before it: its tokens, and a hash of
        its extras if it has any.
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
