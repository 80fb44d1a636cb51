"""Names of a request's chunks, as its tokens become known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_core.token_database import MultimodalSpan
from lmcache_core.token_database.hashing import chain_hashes, tokens_as_uint32


class ChunkNames:
    """The chain of chunk hashes of one request.

    Args:
        root: What the chain begins with, 32 bytes.
        chunk_size: Tokens in a chunk; a shorter rest has no name.
        spans: Multimodal contents behind placeholder tokens.
    """

    def __init__(self, root: bytes, chunk_size: int, spans: Sequence[MultimodalSpan] = ()) -> None:
        self._root = root
        self._chunk_size = chunk_size
        self._spans = tuple(spans)
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Name the chunks that these tokens complete.

        Args:
            token_ids: All tokens of the request from the first, those of earlier calls unchanged.

        Returns:
            The hashes of all whole chunks.
        """
        size, known = self._chunk_size, len(self.hashes)
        num_chunks = len(token_ids) // size
        if num_chunks > known:
            if self._spans:  # their places count from the first token of the sequence
                ids = tokens_as_uint32(token_ids[: num_chunks * size])
                chain = chain_hashes(self._previous, ids, size, self._spans, first=known * size)
            else:
                chain = chain_hashes(
                    self._previous,
                    tokens_as_uint32(token_ids[known * size : num_chunks * size]),
                    size,
                )
            self.hashes += [digest for _, _, digest in chain]
        return self.hashes

    @property
    def _previous(self) -> bytes:
        return self.hashes[-1] if self.hashes else self._root


def spans_of(request: Any, contents: str | None = "") -> list[MultimodalSpan] | None:
    """The multimodal contents of a vLLM request; None when one of them has no name, so that the
    request cannot be cached.

    Args:
        request: vLLM's request.
        contents: What else decides about their KV; None: their names tell nothing.
    """
    spans = []
    for feature in getattr(request, "mm_features", None) or ():
        identifier, position = feature.identifier, feature.mm_position
        if contents is None or not identifier:
            return None
        spans.append(
            MultimodalSpan(f"{contents}{identifier}".encode(), position.offset, position.length)
        )
    return spans
