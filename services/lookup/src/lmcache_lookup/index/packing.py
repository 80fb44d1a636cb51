"""The layout of the index in Redis: names of keys, and the encoding of a bucket's values.

A different layout uses a prefix other than `lmc2:`, so versions never mix.

```
lmc2:{b:00f2}:<tenant>  hash: chunk id (16 bytes) -> holders, concatenated; and, if not 0, two
                        numbers: `#n`, the holders above one for each chunk; `#at`, the hand of
                        `TRIM`
lmc2:{i}:leases         hash: "<owner>/<instance>" -> JSON array of the lease (see redis_scripts)
lmc2:{i}:version        last change of leases: "<seconds>.<microseconds>" by the server's clock
lmc2:{i}:numbers        last instance number; starts at the time in seconds
lmc2:{i}:tenants        set of tenants that have buckets
lmc2:{i}:nodes          JSON array of a cluster's epoch and its masters' run ids
lmc2:{b:00f2}:!         in a cluster, the bucket's mark: when it was last found without one, in ms
lmc2:{i}:marks          the newest marks reported to instances, comma-separated
```
The bucket is the first 6 bits of the chunk id, in two hex digits. Braces enclose a hash tag; its
two letters put bucket k into the k-th of 64 equal ranges of a cluster's slots. A holder:
```
 0  4  instance number     little-endian
 4  8  incarnation
12  8  size in bytes
20  1  length of the tier's name
21  .. the tier's name
```
A chunk with two holders takes 120 bytes of Redis, each further holder 24 to 32, at most 64 holders.
A tenant has at most `max_chunks_per_tenant` holders, a 64th per bucket, but for those of the last
chunk. A full bucket loses dead holders, or else the chunks at which a hand points that goes around
the bucket. A holder counts while its lease lives in its incarnation; lookups clear dead
entries. A lookup is one pipeline per server. Events are one script; in a cluster they are claimed,
written and settled (ADR 10). An unsettled claim ends after two seconds plus the write timeout;
until then callers get 503.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import CHUNK_ID_BYTES
from lmcache_core.lookup import InstanceKind

NUM_BUCKETS: Final = 64
LEASES_KEY: Final = "lmc2:{i}:leases"
VERSION_KEY: Final = "lmc2:{i}:version"
NUMBERS_KEY: Final = "lmc2:{i}:numbers"
TENANTS_KEY: Final = "lmc2:{i}:tenants"
NODES_KEY: Final = "lmc2:{i}:nodes"
MARKS_KEY: Final = "lmc2:{i}:marks"

NUMBER_BYTES: Final = 4

_BUCKET_SHIFT: Final = 2

# Two for each bucket.
_TAG_LETTERS: Final = "f2bdb0fbfsdrbqajaqbjadfhfkc1fhadbaazfcb1dsfrakbpbkapbzdhb8a1dhbzdifhaqbjcaada0c1b0fbdrbdbcajbddrfidhbkapaabzc0a1fcb1frazaybpazfr"  # noqa: E501
_BUCKET_PREFIXES: Final = tuple(
    f"lmc2:{{b:{bucket:02x}{_TAG_LETTERS[2 * bucket : 2 * bucket + 2]}}}:"
    for bucket in range(NUM_BUCKETS)
)

_HOLDER = struct.Struct("<IQQB")


class StoredHolder(NamedTuple):
    """One holder of a chunk, as stored."""

    number: int
    incarnation: int
    size_bytes: int
    tier: str


def bucket_of(chunk_id: bytes) -> int:
    """Return the number of a chunk's bucket, 0 to 63."""
    return chunk_id[0] >> _BUCKET_SHIFT


def split_by_bucket(chunk_ids: Sequence[bytes]) -> list[list[bytes]]:
    """Return the ids in each of the 64 buckets.

    Raises:
        ValueError: The length of one is not 16 bytes.
    """
    buckets: list[list[bytes]] = [[] for _ in range(NUM_BUCKETS)]
    first_bytes = b"".join(chunk_ids)[::CHUNK_ID_BYTES]
    for first_byte, chunk_id in zip(first_bytes, chunk_ids, strict=True):
        buckets[first_byte >> _BUCKET_SHIFT].append(chunk_id)
    return buckets


def bucket_key(tenant: str, bucket: int) -> str:
    """Return the key of a tenant's bucket."""
    return _BUCKET_PREFIXES[bucket] + tenant


def mark_key(bucket: int) -> str:
    """Return the key of a bucket's mark, for all tenants: it is on the bucket's server, and is lost
    with it. No tenant has this name.
    """
    return _BUCKET_PREFIXES[bucket] + "!"


def lease_field(owner: str, instance: str) -> str:
    """Return the field of a lease; neither part can contain a slash."""
    return f"{owner}/{instance}"


def pack_holder(holder: StoredHolder) -> bytes:
    """Return the bytes of one holder."""
    tier = holder.tier.encode("ascii")
    return _HOLDER.pack(holder.number, holder.incarnation, holder.size_bytes, len(tier)) + tier


def pack_life(incarnation: int, size_bytes: int, tier: str) -> bytes:
    """Return the bytes of one holder from its incarnation on; Redis supplies the number."""
    return pack_holder(StoredHolder(0, incarnation, size_bytes, tier))[NUMBER_BYTES:]


def unpack_holders(data: bytes) -> Iterator[StoredHolder]:
    """Parse a bucket's value. Truncated or foreign bytes end the iteration, since an unknown holder
    is as good as none.
    """
    at = 0
    while at + _HOLDER.size <= len(data):
        number, incarnation, size_bytes, length = _HOLDER.unpack_from(data, at)
        begin = at + _HOLDER.size
        at = begin + length
        tier = data[begin:at]
        if len(tier) != length or not tier.isascii():
            return
        yield StoredHolder(number, incarnation, size_bytes, tier.decode("ascii"))


def pack_number(number: int) -> bytes:
    """Return the first 4 bytes of a holder, which identify the instance."""
    return struct.pack("<I", number)


class StoredLease(msgspec.Struct, array_like=True, frozen=True):
    """A lease as written by `redis_scripts`."""

    number: int
    incarnation: str
    kind: InstanceKind
    expires_ms: int
    next_sequence: int
    resync: int


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """One live lease.

    Attributes:
        owner: The tenant that took it.
        expires_at: When it ends, on this process's clock.
    """

    owner: str
    instance: str
    lease: StoredLease
    expires_at: float


@dataclass(frozen=True, slots=True)
class LiveTable:
    """All live leases at one moment.

    Attributes:
        by_identity: (instance number, incarnation) -> instance.
        stale_at: When the first of the leases ends unless renewed: the table must be read again
            then.
    """

    version: bytes
    by_identity: dict[tuple[int, int], LiveInstance] = field(default_factory=dict)
    stale_at: float = float("inf")

    @classmethod
    def from_reply(cls, reply: Sequence[object], now: float) -> LiveTable:
        """Parse the result of the script `TABLE`. `now` is the time on this process's clock at
        which the request was made.

        Raises:
            UnavailableError: Something other than a hash is stored there.
        """
        try:
            now_ms, version, flat = reply
            assert isinstance(now_ms, int)
            assert isinstance(version, bytes)
            assert isinstance(flat, list)
            by_identity: dict[tuple[int, int], LiveInstance] = {}
            for name, raw in zip(flat[::2], flat[1::2], strict=True):
                try:
                    lease = msgspec.json.decode(raw, type=StoredLease)
                    owner, _, instance = name.decode().partition("/")
                    incarnation = int(lease.incarnation)
                except ValueError:  # no lease of ours: its instance replaces it
                    continue
                if lease.expires_ms > now_ms:
                    expires_at = now + (lease.expires_ms - now_ms) / 1000
                    by_identity[lease.number, incarnation] = LiveInstance(
                        owner, instance, lease, expires_at
                    )
            stale_at = min((live.expires_at for live in by_identity.values()), default=float("inf"))
            return cls(version, by_identity, stale_at)
        except (ValueError, TypeError) as exc:
            raise UnavailableError(f"the leases in Redis cannot be read: {exc}") from exc
