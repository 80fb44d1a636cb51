"""How the engines of this pod name KV, and which keys chunks have because of that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.token_database.hashing import chain_hashes_of_bytes, tokens_as_bytes
from lmcache_core.wire.messages import Describe
from lmcache_servicekit.errors import ConflictError

MAX_DESCRIPTIONS = 64
"""Of one client; of all that have gone; and that are told at once."""
MAX_LEFT_BEHIND = 16
"""Of one client that has gone."""
MAX_NAMED_KEYS = 8192
"""Chunks times ranks times groups of layers."""
MAX_NAMED_MODELS = 8
"""Models that an error names."""


class Descriptions:
    """What engines have said, the last ones of each, and some of what those have said that have
    gone. On the event loop only.
    """

    def __init__(self) -> None:
        self._said: dict[Hashable, dict[Describe, None]] = {}
        self._left_behind: dict[Describe, None] = {}

    def __len__(self) -> int:
        return len({known for said in (self._left_behind, *self._said.values()) for known in said})

    def note(self, description: Describe, client: Hashable = "") -> None:
        """A client says how it names KV; that pushes out its own oldest word, never another
        client's.
        """
        said = self._said.pop(client, {})
        self._said[client] = said
        _add(said, description)

    def said_by(self, client: Hashable) -> tuple[Describe, ...]:
        """What that client has said, the last one last."""
        return tuple(self._said.get(client, ()))

    def left(self, client: Hashable) -> None:
        """That client has gone."""
        for description in list(self._said.pop(client, ()))[-MAX_LEFT_BEHIND:]:
            _add(self._left_behind, description)

    def of(self, model_name: str | None = None) -> list[Describe]:
        """Those of that model (of all, if none is named): the last one of each client, then the one
        before of each, and so on.

        Whoever spoke last comes first; those that have gone count as one who spoke before all
        others. At most `MAX_DESCRIPTIONS`.

        Raises:
            ConflictError: There is none.
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


class ChunkNamer:
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
        self.check_tokens(len(token_ids))
        # Without numpy, which a sidecar needs for nothing else and which would be a third of its
        # image.
        chain = chain_hashes_of_bytes(
            self._description.root, tokens_as_bytes(token_ids), self._description.chunk_size
        )
        return [self._named(digest.hex(), start, end) for start, end, digest in chain]

    def of_hashes(self, chunk_hashes: Sequence[str]) -> list[NamedChunk]:
        """The chunks of these hashes.

        Raises:
            ConfigError: They have too many keys.
        """
        self.check_chunks(len(chunk_hashes))
        return [self._named(chunk_hash) for chunk_hash in chunk_hashes]

    def check_tokens(self, num_tokens: int) -> None:
        """As `check_chunks`, for the chunks of so many tokens."""
        self.check_chunks(-(-num_tokens // self._description.chunk_size))

    def check_chunks(self, num_chunks: int) -> None:
        """Refuse to name too much at once.

        Raises:
            ConfigError: So many chunks have more than `MAX_NAMED_KEYS` keys.
        """
        known = self._description
        keys_per_chunk = known.world_size * len(known.groups)
        if num_chunks * keys_per_chunk > MAX_NAMED_KEYS:
            raise ConfigError(
                f"{num_chunks} chunks of model {known.model_name!r} ({known.world_size} ranks,"
                f" {len(known.groups)} groups of layers): at most {MAX_NAMED_KEYS} keys at once;"
                f" ask for {MAX_NAMED_KEYS // keys_per_chunk} chunks or fewer"
            )

    def _named(
        self, chunk_hash: str, start: int | None = None, end: int | None = None
    ) -> NamedChunk:
        known = self._description
        keys = tuple(
            ChunkKey(
                self._tenant,
                CacheEngineKey(
                    known.fmt, known.model_name, known.world_size, rank, chunk_hash, group
                ),
            )
            for rank, group in product(range(known.world_size), known.groups)
        )
        return NamedChunk(chunk_hash, keys, start, end)


def namers(
    tenant: str, descriptions: Sequence[Describe], check: Callable[[ChunkNamer], None]
) -> list[tuple[Describe, ChunkNamer]]:
    """Those of the descriptions by which everything that is asked for can be named: one that cannot
    does not cost the others their answer.

    Args:
        tenant: Namespace of this pod.
        descriptions: At least one.
        check: Raises `ConfigError` where it is too much.

    Raises:
        ConfigError: It is too much for all of them; what the first says.
    """
    able: list[tuple[Describe, ChunkNamer]] = []
    errors: list[ConfigError] = []
    for description in descriptions:
        namer = ChunkNamer(tenant, description)
        try:
            check(namer)
        except ConfigError as exc:
            errors.append(exc)
        else:
            able.append((description, namer))
    if not able:
        raise errors[0]
    return able
