"""Names of chunks, as they come over the socket and as tiers are asked for them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.errors import IdentityError, ProtocolError
from lmcache_core.keys import CacheEngineKey, ChunkChain, ChunkKey
from lmcache_core.sidecar.messages import Describe

from lmcache_sidecar.descriptions import MAX_NAMED_KEYS

MAX_REMEMBERED_KEYS = 32_768
MAX_REMEMBERED_KEY_BYTES = 512


class KeyMemo:
    """Reads keys, and remembers those that were read: a prompt is looked up, stored and loaded
    under the same ones.

    Args:
        tenant: Whose they are.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._known: dict[bytes, ChunkKey] = {}

    def names(self, keys: Sequence[bytes]) -> list[ChunkKey]:
        """The chunks of these canonical keys.

        Raises:
            ProtocolError: One is not a canonical key.
        """
        known = self._known
        names = [known.get(key) for key in keys]
        try:
            return [
                self._read(key) if name is None else name
                for key, name in zip(keys, names, strict=True)
            ]
        except IdentityError as exc:
            raise ProtocolError(str(exc)) from exc

    def _read(self, key: bytes) -> ChunkKey:
        name = ChunkKey(self._tenant, CacheEngineKey.from_canonical(key))
        if len(key) <= MAX_REMEMBERED_KEY_BYTES:
            if len(self._known) >= MAX_REMEMBERED_KEYS:
                self._known.clear()
            self._known[key] = name
        return name


def check_chains(chains: Sequence[ChunkChain]) -> None:
    """Refuse chains whose keys no tier could spell.

    Raises:
        ProtocolError: The fields of one are too long.
    """
    for chain in chains:
        _check_spelling(chain.fmt, chain.model_name, chain.world_size, chain.group)


def check_names(description: Describe) -> None:
    """The same for a description; and one by which not even a single chunk could be named helps
    nobody.

    Raises:
        ProtocolError: Its fields are too long, or its chunks have too many keys.
    """
    num_keys = description.world_size * len(description.groups)
    if num_keys > MAX_NAMED_KEYS:
        raise ProtocolError(
            f"a description of chunks with {num_keys} keys; the limit is {MAX_NAMED_KEYS}"
        )
    for group in description.groups:
        _check_spelling(description.fmt, description.model_name, description.world_size, group)


def _check_spelling(fmt: str, model_name: str, world_size: int, group: str) -> None:
    try:
        CacheEngineKey(fmt, model_name, world_size, world_size - 1, "0" * 64, group).canonical()
    except IdentityError as exc:
        raise ProtocolError(str(exc)) from exc
