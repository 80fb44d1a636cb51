"""Names of cached KV: the documented `CacheEngineKey`, the tenant's `ChunkKey`, the anonymous chunk
id, and the `Lane` shared by many chunks' names.

Source: `docs/protocols.md`, "Identity". Golden vectors: `tests/contract/golden/identity.json`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from binascii import hexlify, unhexlify
from functools import lru_cache
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec

from lmcache_core.errors import IdentityError

CHUNK_ID_BYTES = 16
CHUNK_HASH_BYTES = 32
MAX_TOKEN_ID = 0xFFFFFFFF
MAX_CANONICAL_KEY_BYTES = 4096
MAX_KEY_FIELD_BYTES = 1024

TAIL = "+tail"
"""Ends the group's name of a tail."""

_CANONICAL_MAGIC = b"LMK1"
_CHUNK_ID_TAG = b"lmcache/chunk-id/1\0"
_LENGTH = struct.Struct("<H")
_NUMBERS = struct.Struct("<II")
_HASH_LENGTH = _LENGTH.pack(2 * CHUNK_HASH_BYTES)
_HASH_FIELD_BYTES = len(_HASH_LENGTH) + 2 * CHUNK_HASH_BYTES
_NO_GROUP = _LENGTH.pack(0)
_new_key = object.__new__
_NUM_TEXT_PARTS = 5
_MAX_NUMBER_DIGITS = len(str(2**32 - 1))
_MAX_CACHED_PREFIXES = 64
"""Cached prefixes of canonical keys: models times workers, each at most 2 KiB."""


class CacheEngineKey:
    """The documented key of one chunk of KV. Immutable and hashable.

    It holds a lane and the bytes of the hash, as names cross the wire. Lookups create one for each
    chunk, and few of them are ever read as text.

    Args:
        fmt: Serving engine's KV format, for example "vllm" or "huggingface".
        model_name: Model, as named by the serving engine; may contain any character.
        world_size: Number of workers that share the KV of one token.
        worker_id: The worker that this KV belongs to.
        chunk_hash: Hex SHA-256 of the chunk and everything before it (see `token_database`).
        group: Name of the layer group for hybrid models, "" for the only or full-attention group.
    """

    __slots__ = ("_hash", "_lane")

    def __init__(
        self,
        fmt: str,
        model_name: str,
        world_size: int,
        worker_id: int,
        chunk_hash: str,
        group: str = "",
    ) -> None:
        self._lane = Lane(fmt, model_name, world_size, worker_id, group)
        packed = _packed(chunk_hash.encode()) if chunk_hash.isascii() else None
        self._hash: bytes | str = chunk_hash if packed is None else packed

    @property
    def fmt(self) -> str:
        """Serving engine's KV format."""
        return self._lane.fmt

    @property
    def model_name(self) -> str:
        """Model, as named by the serving engine."""
        return self._lane.model_name

    @property
    def world_size(self) -> int:
        """Number of workers that share the KV of one token."""
        return self._lane.world_size

    @property
    def worker_id(self) -> int:
        """The worker that this KV belongs to."""
        return self._lane.worker_id

    @property
    def chunk_hash(self) -> str:
        """Hex SHA-256 of the chunk and everything before it."""
        return self._hash if isinstance(self._hash, str) else self._hash.hex()

    @property
    def group(self) -> str:
        """Name of the layer group."""
        return self._lane.group

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheEngineKey):
            return NotImplemented
        return self._hash == other._hash and self._lane == other._lane

    def __hash__(self) -> int:
        return hash((self._hash, self._lane))

    def __repr__(self) -> str:
        return (
            f"CacheEngineKey(fmt={self.fmt!r}, model_name={self.model_name!r},"
            f" world_size={self.world_size!r}, worker_id={self.worker_id!r},"
            f" chunk_hash={self.chunk_hash!r}, group={self.group!r})"
        )

    def canonical(self) -> bytes:
        """Return an unambiguous encoding of this key: length-prefixed UTF-8 fields and two
        little-endian uint32.

        Raises:
            IdentityError: A field is longer than `MAX_KEY_FIELD_BYTES` or not Unicode text, the key
                is longer than `MAX_CANONICAL_KEY_BYTES`, or a number does not fit.
        """
        lane, packed = self._lane, self._hash
        prefix = _canonical_prefix(lane.fmt, lane.model_name, lane.world_size, lane.worker_id)
        if isinstance(packed, bytes) and not lane.group:
            return prefix + _HASH_LENGTH + hexlify(packed) + _NO_GROUP  # nearly all keys
        data = prefix + _field("chunk_hash", self.chunk_hash) + _field("group", lane.group)
        if len(data) > MAX_CANONICAL_KEY_BYTES:
            raise IdentityError(
                f"key has {len(data)} bytes; the limit is {MAX_CANONICAL_KEY_BYTES}"
            )
        return data

    @classmethod
    def from_canonical(cls, data: bytes) -> CacheEngineKey:
        """Parse the result of `canonical()`.

        Raises:
            IdentityError: The bytes are not a canonical key.
        """
        if len(data) > MAX_CANONICAL_KEY_BYTES or data[:4] != _CANONICAL_MAGIC:
            raise IdentityError("not a canonical key: wrong magic or too long")
        try:
            at = _end_of_prefix(data)
            lane = _read_prefix(data[:at])
            if data[at : at + 2] == _HASH_LENGTH and data[at + _HASH_FIELD_BYTES :] == _NO_GROUP:
                packed = _packed(data[at + 2 : at + _HASH_FIELD_BYTES])
                if packed is not None:  # nearly all keys; parsed in half the time
                    return lane.key(packed)
            chunk_hash, at = _read_field(data, at)
            group, at = _read_field(data, at)
        except (struct.error, IndexError, UnicodeDecodeError) as exc:
            raise IdentityError(f"not a canonical key: {exc}") from exc
        if at != len(data):
            raise IdentityError("not a canonical key: bytes after its end")
        return cls(lane.fmt, lane.model_name, lane.world_size, lane.worker_id, chunk_hash, group)

    def to_string(self) -> str:
        """Return the readable form `fmt@model@world_size@worker_id@chunk_hash[@group]`, with `@`,
        `%` and control characters escaped.

        Raises:
            IdentityError: A field is no Unicode text.
        """
        parts = [
            _escape(self.fmt),
            _escape(self.model_name),
            str(self.world_size),
            str(self.worker_id),
            _escape(self.chunk_hash),
        ]
        if self.group:
            parts.append(_escape(self.group))
        return "@".join(parts)

    @classmethod
    def from_string(cls, text: str) -> CacheEngineKey:
        """Parse the result of `to_string()`.

        Raises:
            IdentityError: The text does not have five or six parts, or a number is malformed.
        """
        parts = text.split("@")
        if len(parts) not in (_NUM_TEXT_PARTS, _NUM_TEXT_PARTS + 1):
            raise IdentityError(
                f"key {text[:80]!r}: expected fmt@model@world_size@worker_id@chunk_hash"
            )
        if not all(
            part.isascii() and part.isdigit() and len(part) <= _MAX_NUMBER_DIGITS
            for part in parts[2:4]
        ):
            raise IdentityError(
                f"key {text[:80]!r}: world_size and worker_id must be decimal numbers up to 2^32-1"
            )
        try:
            names = [unquote(part, errors="strict") for part in (parts[0], parts[1], *parts[4:])]
        except UnicodeDecodeError as exc:
            raise IdentityError(f"key {text[:80]!r}: an escape is not UTF-8") from exc
        return cls(names[0], names[1], int(parts[2]), int(parts[3]), *names[2:])

    def to_url(self) -> str:
        """Return the canonical bytes as URL-safe text: base64url without padding."""
        return base64.urlsafe_b64encode(self.canonical()).rstrip(b"=").decode("ascii")

    @classmethod
    def from_url(cls, text: str) -> CacheEngineKey:
        """Parse the result of `to_url()`.

        Raises:
            IdentityError: The text is not a result of `to_url`.
        """
        try:
            data = base64.b64decode(
                text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True
            )
        except (UnicodeEncodeError, binascii.Error) as exc:
            raise IdentityError(f"key {text[:80]!r} in a URL is not base64url") from exc
        key = cls.from_canonical(data)
        if key.to_url() != text:
            raise IdentityError(f"key {text[:80]!r} in a URL is not in its canonical spelling")
        return key

    def lane(self) -> Lane:
        """Return everything of this name except the chunk hash."""
        return self._lane

    def hash_bytes(self) -> bytes | None:
        """Return the chunk hash as its 32 bytes; None if it is not 64 lower-case hex digits."""
        return self._hash if isinstance(self._hash, bytes) else None

    def chunk_id(self) -> bytes:
        """Return the anonymous name of this chunk for lookup and broker: 16 bytes that reveal
        neither model nor tokens.
        """
        return hashlib.sha256(_CHUNK_ID_TAG + self.canonical()).digest()[:CHUNK_ID_BYTES]


DEFAULT_TENANT = "default"

_Text = Annotated[str, msgspec.Meta(max_length=MAX_KEY_FIELD_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Lane(
    msgspec.Struct,
    frozen=True,
    gc=False,
    cache_hash=True,
    array_like=True,
    forbid_unknown_fields=True,
):
    """The common part of the names of consecutive chunks of one rank; a chunk's name is its lane
    and the 32 bytes of its hash. Fields as in `CacheEngineKey`. Immutable and hashable.
    """

    fmt: _Text
    model_name: _Text
    world_size: _Number
    worker_id: _Number
    group: _Text = ""

    @property
    def is_tail(self) -> bool:
        """Whether its chunks are tails: the blocks of a prompt behind its last whole chunk, stored
        for one engine to take over from another, and needed for a moment only.
        """
        return self.group.endswith(TAIL)

    @property
    def tail(self) -> Lane:
        """The lane of the tails that belong to its chunks."""
        return msgspec.structs.replace(self, group=self.group + TAIL)

    def check(self) -> None:
        """Raise `IdentityError` if keys of this lane cannot be encoded."""
        self.keys(bytes(CHUNK_HASH_BYTES))[0].canonical()

    def key(self, packed_hash: bytes | str) -> CacheEngineKey:
        """Return the key of a chunk of this lane; its hash as in `ChunkKey`."""
        key = _new_key(CacheEngineKey)
        key._lane, key._hash = self, packed_hash
        return key

    def keys(self, hashes: bytes) -> list[CacheEngineKey]:
        """Return the keys of chunk hashes packed in order."""
        return [self.key(packed) for packed in each_hash(hashes)]

    def chunk_keys(self, tenant: str, hashes: bytes) -> list[ChunkKey]:
        """Return a tenant's keys of chunk hashes packed in order."""
        return [ChunkKey(tenant, self, packed) for packed in each_hash(hashes)]


class ChunkKey(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """A `CacheEngineKey` of one authenticated tenant, by which tiers are indexed. Immutable and
    hashable.

    A struct, since every request creates one for each chunk: it takes a tenth of the time of a
    dataclass, and is hashed once.

    Attributes:
        packed_hash: The 32 bytes of the chunk hash, or its text if it is not 64 lower-case hex
            digits.
    """

    tenant: str
    lane: Lane
    packed_hash: bytes | str

    @classmethod
    def of(cls, tenant: str, key: CacheEngineKey) -> ChunkKey:
        """Return a tenant's name of the chunk with that key."""
        return cls(tenant, key._lane, key._hash)

    @property
    def key(self) -> CacheEngineKey:
        """The documented key."""
        return self.lane.key(self.packed_hash)

    def __repr__(self) -> str:
        return f"ChunkKey.of(tenant={self.tenant!r}, key={self.key!r})"


class ChunkChain(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The keys of consecutive chunks of one layer group, for all ranks, with their common part
    stored once.

    Attributes:
        world_size: Number of ranks; a chunk exists when all of them have stored it.
        hashes: The chunk hashes, `CHUNK_HASH_BYTES` each, packed in order.

    Raises:
        ValueError: There is no rank, or the hashes are not a whole number of hashes.
    """

    fmt: _Text
    model_name: _Text
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    group: _Text
    hashes: bytes

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size}: must be at least 1")
        if len(self.hashes) % CHUNK_HASH_BYTES:
            raise ValueError(
                f"hashes={len(self.hashes)} bytes: must be a multiple of {CHUNK_HASH_BYTES}"
            )

    @property
    def num_chunks(self) -> int:
        """Number of chunks, each of `world_size` keys."""
        return len(self.hashes) // CHUNK_HASH_BYTES

    def chunk_keys(self, tenant: str) -> list[ChunkKey]:
        """Return all keys for a tenant: those of the first chunk by rank, then those of the second,
        and so on.
        """
        lanes = [
            Lane(self.fmt, self.model_name, self.world_size, rank, self.group)
            for rank in range(self.world_size)
        ]
        return [
            ChunkKey(tenant, lane, packed) for packed in each_hash(self.hashes) for lane in lanes
        ]

    def part(self, start: int, end: int) -> ChunkChain:
        """Return the chain of chunks `[start, end)`."""
        return msgspec.structs.replace(
            self, hashes=self.hashes[start * CHUNK_HASH_BYTES : end * CHUNK_HASH_BYTES]
        )


def each_hash(hashes: bytes) -> list[bytes]:
    """Return the chunk hashes that are packed in order."""
    return [hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)]


def _packed(digits: bytes) -> bytes | None:
    """Return the 32 bytes of a chunk hash; None if it is not 64 lower-case hex digits, so that each
    hash has one form.
    """
    if len(digits) != 2 * CHUNK_HASH_BYTES:
        return None
    try:
        packed = unhexlify(digits)
    except binascii.Error:
        return None
    return packed if hexlify(packed) == digits else None


@lru_cache(maxsize=_MAX_CACHED_PREFIXES, typed=True)
def _canonical_prefix(fmt: str, model_name: str, world_size: int, worker_id: int) -> bytes:
    """Return the common prefix of the canonical bytes of all chunks of one worker; cached because
    lookups encode many keys.
    """
    try:
        numbers = _NUMBERS.pack(world_size, worker_id)
    except struct.error as exc:
        raise IdentityError(
            f"world_size={world_size!r}, worker_id={worker_id!r}: need integers in 0 … 2^32-1"
        ) from exc
    return _CANONICAL_MAGIC + _field("fmt", fmt) + _field("model_name", model_name) + numbers


def _end_of_prefix(data: bytes) -> int:
    at = len(_CANONICAL_MAGIC)
    at += _LENGTH.size + (data[at] | data[at + 1] << 8)
    at += _LENGTH.size + (data[at] | data[at + 1] << 8)
    return at + _NUMBERS.size


@lru_cache(maxsize=_MAX_CACHED_PREFIXES)
def _read_prefix(prefix: bytes) -> Lane:
    """Invert `_canonical_prefix`, as a lane without a group; cached for the same reason."""
    fmt, at = _read_field(prefix, len(_CANONICAL_MAGIC))
    model_name, at = _read_field(prefix, at)
    return Lane(fmt, model_name, *_NUMBERS.unpack_from(prefix, at))


def _field(name: str, text: str) -> bytes:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise IdentityError(
            f"key field {name}={text[:80]!r} is not Unicode text: {exc.reason}"
        ) from exc
    if len(data) > MAX_KEY_FIELD_BYTES:
        raise IdentityError(
            f"key field {name} has {len(data)} bytes; the limit is {MAX_KEY_FIELD_BYTES}"
        )
    return _LENGTH.pack(len(data)) + data


def _read_field(data: bytes, at: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(data, at)
    begin = at + _LENGTH.size
    end = begin + length
    if length > MAX_KEY_FIELD_BYTES or end > len(data):
        raise IdentityError("not a canonical key: a field leaves the bytes")
    return data[begin:end].decode("utf-8"), end


def _escape(text: str) -> str:
    try:
        return quote(text, safe="/:+= ,()[]")
    except UnicodeEncodeError as exc:
        raise IdentityError(f"key field {text[:80]!r} is not Unicode text: {exc.reason}") from exc
