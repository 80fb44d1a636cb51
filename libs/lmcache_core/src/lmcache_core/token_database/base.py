"""Interface of token databases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey

if TYPE_CHECKING:
    import torch

MAX_CONTENT_HASH_BYTES = 255
MAX_SPAN_TOKENS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class MultimodalSpan:
    """An image, sound or video whose placeholder tokens cover `[offset, offset + length)` of the
    sequence.

    Attributes:
        content_hash: Hash of the content, 1 to 255 bytes; two contents never share one.
        length: Number of placeholder tokens, at least 1.

    Raises:
        ValueError: A field is outside its range.
    """

    content_hash: bytes
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.content_hash) <= MAX_CONTENT_HASH_BYTES:
            raise ValueError(
                f"content_hash has {len(self.content_hash)} bytes; it must have 1 to"
                f" {MAX_CONTENT_HASH_BYTES}"
            )
        if self.offset < 0 or not 1 <= self.length <= MAX_SPAN_TOKENS:
            raise ValueError(
                f"offset={self.offset}, length={self.length}: a span covers at least one token of"
                " the sequence"
            )


class TokenDatabase(ABC):
    """Turns tokens into the keys of their chunks. Called by many threads concurrently.

    Only `process_tokens(tokens, mask)` is required. Without the parameter `spans` a database serves
    text only, since spans are passed only if there are some; without `use_salt` it serves tenants
    without a salt, and without `use_revision` models whose weights never change.
    """

    @abstractmethod
    def process_tokens(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
    ) -> Iterable[tuple[int, int, CacheEngineKey]]:
        """Split tokens into chunks and name each.

        Args:
            tokens: Token ids, shape `[seq_len]`, any integer dtype, on CPU.
            mask: Booleans, shape `[seq_len]`: Falses (if any) first, their number a multiple of the
                chunk size. Masked chunks enter the hashes but are not yielded.
            spans: Multimodal contents of placeholder tokens; each is part of the name of every
                chunk that it overlaps and of all chunks after it.

        Returns:
            `(start, end, key)` of each chunk, in order; the last one may be shorter than the
            others.

        Raises:
            ValueError: The mask is not of that form, or a token id is negative or above 2^32-1.
        """

    def use_salt(self, salt: str) -> None:
        """Make the salt part of every key from now on.

        Raises:
            ConfigError: This database does not support a salt, and the salt is not empty: without
                it, tenants would share keys.
        """
        if salt:
            raise ConfigError(
                f"salt: {type(self).__name__} does not make it part of its keys; use a token"
                " database that does, or no salt"
            )

    def use_revision(self, revision: str) -> None:
        """Make another revision of the model part of every key from now on.

        Raises:
            ConfigError: This database does not support it.
        """
        raise ConfigError(
            f"revision: {type(self).__name__} cannot name the KV of a model that has changed; use a"
            " token database that can, or open the cache again"
        )
