"""How the engines of this pod name KV, and the keys of chunks that follow from it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.token_database.hashing import chain_hashes_of_bytes, tokens_as_bytes
from lmcache_core.wire.messages import Describe
from lmcache_servicekit.errors import ConflictError

MAX_DESCRIPTIONS = 64
"""Limit per client, for all clients that have left together, and for one answer."""
MAX_LEFT_BEHIND = 16
"""Limit per client that has left."""
MAX_NAMED_KEYS = 8192
"""Chunks times ranks times groups of layers."""
MAX_NAMED_MODELS = 8
"""Models that an error lists."""


class Descriptions:
    """The latest descriptions of each engine, and some of engines that have left. For use on the
    event loop.
    """

    def __init__(self) -> None:
        self._said: dict[Hashable, dict[Describe, None]] = {}
        self._left_behind: dict[Describe, None] = {}

    def __len__(self) -> int:
        return len({known for said in (self._left_behind, *self._said.values()) for known in said})

    def note(self, description: Describe, client: Hashable = "") -> None:
        """Record how a client names KV. It may displace the client's oldest description, never
        another client's.
        """
        said = self._said.pop(client, {})
        self._said[client] = said
        _add(said, description)

    def said_by(self, client: Hashable) -> tuple[Describe, ...]:
        """Return the descriptions of that client, latest last."""
        return tuple(self._said.get(client, ()))

    def chunk_tokens(self) -> dict[str, float]:
        """Return tokens for each chunk of each model: a chunk is one rank's and one group's part of
        `chunk_size` tokens. Where descriptions of a model differ, the latest counts.
        """
        return {
            known.model_name: known.chunk_size / (known.world_size * len(known.groups))
            for said in (self._left_behind, *self._said.values())
            for known in said
        }

    def left(self, client: Hashable) -> None:
        """Record that a client has left."""
        for description in list(self._said.pop(client, ()))[-MAX_LEFT_BEHIND:]:
            _add(self._left_behind, description)

    def of(self, model_name: str | None = None) -> list[Describe]:
        """Return the descriptions of a model, or all: the latest of each client, then the previous
        one of each, and so on.

        The client that sent one last comes first; those that have left count as one client, older
        than all others. At most `MAX_DESCRIPTIONS`.

        Raises:
            ConflictError: There are none.
        """
        clients = (*reversed(self._said.values()), self._left_behind)
        in_turn = [
            known
            for turn in zip_longest(*map(reversed, clients))
            for known in turn
            if known is not None
        ]
        if not in_turn:
            raise ConflictError(
                "how KV is named here is not known yet: an engine must have connected to this"
                " sidecar once"
            )
        found = [
            known
            for known in dict.fromkeys(in_turn)
            if model_name is None or known.model_name == model_name
        ]
        if not found:
            models = dict.fromkeys(repr(known.model_name) for known in in_turn)
            named = ", ".join(list(models)[:MAX_NAMED_MODELS])
            raise ConflictError(
                f"no engine of the model {model_name!r} has connected; known: {named}"
            )
        return found[:MAX_DESCRIPTIONS]


def _add(said: dict[Describe, None], description: Describe) -> None:
    said.pop(description, None)
    said[description] = None
    if len(said) > MAX_DESCRIPTIONS:
        del said[next(iter(said))]


@dataclass(frozen=True, slots=True)
class NamedChunk:
    """A chunk with its keys for all ranks and groups of layers.

    Attributes:
        chunk_hash: 64 hex digits.
        keys: By rank, then by group.
        start: Its first token; None if only the hash is known.
        end: One past its last token.
    """

    chunk_hash: str
    keys: tuple[ChunkKey, ...]
    start: int | None = None
    end: int | None = None


def named_chunks(
    tenant: str,
    descriptions: Sequence[Describe],
    chunk_hashes: Sequence[str],
    token_ids: Sequence[int] = (),
) -> Iterator[tuple[Describe, list[NamedChunk]]]:
    """Name chunks according to each description, one description after the other. A description
    that leads to too many keys is skipped, so that the others are still answered.

    Args:
        descriptions: At least one.
        chunk_hashes: Hashes of the chunks; or
        token_ids: A prompt of text, all of whose chunks are named.

    Raises:
        ConfigError: Every description leads to too many keys; states the limit of the first.
        ValueError: A token id is negative or above 2^32-1.
    """
    errors: list[ConfigError] = []
    for known in descriptions:
        num_chunks = len(chunk_hashes) or -(-len(token_ids) // known.chunk_size)
        keys_per_chunk = known.world_size * len(known.groups)
        if num_chunks * keys_per_chunk > MAX_NAMED_KEYS:
            error = (
                f"{num_chunks} chunks of model {known.model_name!r} ({known.world_size} ranks,"
                f" {len(known.groups)} groups of layers): at most {MAX_NAMED_KEYS} keys a request;"
                f" ask for {MAX_NAMED_KEYS // keys_per_chunk} chunks or fewer"
            )
            errors.append(ConfigError(error))
            continue
        named: list[tuple[str, int | None, int | None]]
        named = [(chunk_hash, None, None) for chunk_hash in chunk_hashes]
        if token_ids:
            # Without numpy, which a sidecar does not need otherwise and which would be a third of
            # its image.
            chain = chain_hashes_of_bytes(known.root, tokens_as_bytes(token_ids), known.chunk_size)
            named = [(digest.hex(), start, end) for start, end, digest in chain]
        yield (
            known,
            [
                NamedChunk(chunk_hash, _keys(tenant, known, chunk_hash), start, end)
                for chunk_hash, start, end in named
            ],
        )
    if len(errors) == len(descriptions):
        raise errors[0]


def _keys(tenant: str, known: Describe, chunk_hash: str) -> tuple[ChunkKey, ...]:
    fmt, model, num_ranks = known.fmt, known.model_name, known.world_size
    return tuple(
        ChunkKey.of(tenant, CacheEngineKey(fmt, model, num_ranks, rank, chunk_hash, group))
        for rank, group in product(range(num_ranks), known.groups)
    )
