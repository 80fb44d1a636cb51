"""How the engines of this pod name KV, and which keys chunks have because of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.sidecar.messages import Describe
from lmcache_servicekit.errors import ConflictError

MAX_DESCRIPTIONS = 64
MAX_NAMED_KEYS = 8192
"""Chunks times ranks times groups of layers."""
MAX_NAMED_MODELS = 8
"""Models that an error names."""


class Descriptions:
    """What engines have said, the last ones, also of those that have gone. On the event loop only."""

    def __init__(self) -> None:
        self._known: dict[Describe, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, description: Describe) -> None:
        """An engine says how it names KV."""
        self._known.pop(description, None)
        self._known[description] = None
        if len(self._known) > MAX_DESCRIPTIONS:
            del self._known[next(iter(self._known))]

    def of(self, model_name: str | None = None) -> list[Describe]:
        """Those of that model (of all, if none is named), the last one first.

        Raises:
            ConflictError: There is none.
        """
        found = [known for known in reversed(self._known) if model_name is None or known.model_name == model_name]
        if not self._known:
            raise ConflictError("how KV is named here is not known yet: an engine must have connected to this sidecar once")
        if not found:
            models = dict.fromkeys(repr(known.model_name) for known in reversed(self._known))
            named = ", ".join(list(models)[:MAX_NAMED_MODELS])
            raise ConflictError(f"no engine of the model {model_name!r} has connected; known: {named}")
        return found


@dataclass(frozen=True, slots=True)
class NamedChunk:
    """A chunk, and its keys for all ranks and groups of layers.

    Attributes:
        chunk_hash: 64 hex digits.
        keys: By rank, then by group.
        start: Its first token; None where only the hash is known.
        end: Behind its last one.
    """

    chunk_hash: str
    keys: tuple[ChunkKey, ...]
    start: int | None = None
    end: int | None = None


class Namer:
    """Names chunks as one description says.

    Args:
        tenant: Namespace of this pod.
        description: How.
    """

    def __init__(self, tenant: str, description: Describe) -> None:
        self._tenant = tenant
        self._description = description

    def of_tokens(self, token_ids: Sequence[int]) -> list[NamedChunk]:
        """The chunks of a prompt of text, in order.

        Raises:
            ConfigError: They have too many keys.
            ValueError: A token id is negative or above 2^32-1.
        """
        self._check(-(-len(token_ids) // self._description.chunk_size))
        from lmcache_core.token_database.hashing import chain_hashes, tokens_as_uint32  # needs numpy, which nothing else here does

        chain = chain_hashes(self._description.root, tokens_as_uint32(token_ids), self._description.chunk_size)
        return [self._named(digest.hex(), start, end) for start, end, digest in chain]

    def of_hashes(self, chunk_hashes: Sequence[str]) -> list[NamedChunk]:
        """The chunks of these hashes.

        Raises:
            ConfigError: They have too many keys.
        """
        self._check(len(chunk_hashes))
        return [self._named(chunk_hash) for chunk_hash in chunk_hashes]

    def _check(self, num_chunks: int) -> None:
        known = self._description
        keys_per_chunk = known.world_size * len(known.groups)
        if num_chunks * keys_per_chunk > MAX_NAMED_KEYS:
            raise ConfigError(
                f"{num_chunks} chunks of model {known.model_name!r} ({known.world_size} ranks, {len(known.groups)} groups of layers): "
                f"at most {MAX_NAMED_KEYS} keys at once; ask for {MAX_NAMED_KEYS // keys_per_chunk} chunks or fewer"
            )

    def _named(self, chunk_hash: str, start: int | None = None, end: int | None = None) -> NamedChunk:
        known = self._description
        keys = tuple(
            ChunkKey(self._tenant, CacheEngineKey(known.fmt, known.model_name, known.world_size, rank, chunk_hash, group))
            for rank, group in product(range(known.world_size), known.groups)
        )
        return NamedChunk(chunk_hash, keys, start, end)
