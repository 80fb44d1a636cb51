"""Records as objects of one bucket. Blocking, thread-safe.

Objects are named `<prefix><tenant>/<2 hex>/<64 hex>.kvr`, one record each. The 64 digits are the
SHA-256 of its canonical key, as in the names of the disk tier: a name reveals neither model nor
tokens, all names have the same length, and they are evenly distributed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Final
from urllib.parse import quote

from lmcache_core.errors import RecordError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.names import BUCKET_TIER
from lmcache_core.record import (
    MAX_HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    RecordReason,
    Result,
    check_digest,
    decode_head,
    decode_prefix,
    payload_hasher,
)
from lmcache_core.storage.disk.layout import record_name
from lmcache_core.wire.incoming import miss_for

from lmcache_storage.s3.client import BucketClient
from lmcache_storage.s3.connections import FAILURES, BucketAnswer, why
from lmcache_storage.settings import S3Settings

logger = logging.getLogger(__name__)

STORED_AT: Final = "x-amz-meta-lmcache-stored-at"
"""Metadata of an object that is newer than its chunk: when the chunk was stored, seconds since the
epoch.
"""
LIST_OBJECTS: Final = 1000
MAX_LIST_BYTES: Final = 8 << 20
CHECKED_BYTES: Final = 1 << 20
"""Size of the pieces in which an object is read for a check."""
DIGESTED_BYTES: Final = 1 << 20
"""A payload is digested piece by piece, while each is still in the processor's cache."""
MAX_RECORD_BYTES: Final = MAX_HEAD_BYTES + MAX_PAYLOAD_BYTES
PROBE: Final = "lmcache-probe"
_OF_ANOTHER_VERSION: Final = frozenset({RecordReason.VERSION, RecordReason.EXTENSION})

_ENTRY = re.compile(r"<Key>([^<]*)</Key>")
_CONTINUED = re.compile(r"<NextContinuationToken>([^<]*)</NextContinuationToken>")
_RECORD = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}\.kvr")
_TENANT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*/")


def object_name(prefix: str, key: ChunkKey) -> str:
    """Return the name of a chunk's object."""
    name = record_name(key.key)
    return f"{prefix}{tenant_name(key.tenant)}/{name[:2]}/{name}"


def tenant_name(tenant: str) -> str:
    """Return a tenant's part of names: unique per tenant, without `/`, never `.` or `..`, and
    needing no quoting in URLs.
    """
    name = quote(tenant, safe="").replace("~", "%7E").replace("%", "=")
    return "=2E" + name[1:] if name.startswith(".") else name


def is_record(name: str, prefix: str, tenant: str | None) -> bool:
    """Return whether an object of that name claims to be a record of that tenant (None: of any).
    Nothing else is ever removed.
    """
    if not name.startswith(prefix):
        return False
    rest = name[len(prefix) :]
    beginning = _TENANT.match(rest)
    if beginning is None or (tenant is not None and beginning[0] != tenant_name(tenant) + "/"):
        return False
    return _RECORD.fullmatch(rest, beginning.end()) is not None


@dataclass(slots=True)
class FoundObject:
    """A record whose head has been read and matches the request; its payload comes next.

    Attributes:
        stored_at: When the chunk was stored, seconds since the epoch; None if unknown.
        pieces: The rest of the object; its connection is held until `BucketObjects.read` or
            `close`.
    """

    key: ChunkKey
    header: RecordHeader
    head: bytes
    payload_bytes: int
    stored_at: float | None
    pieces: _Pieces

    def close(self) -> None:
        """Give the connection back."""
        self.pieces.close()


@dataclass(frozen=True, slots=True)
class _Version:
    """What the bucket says about an object.

    Attributes:
        etag: Its tag, without quotes: of an object written by one request usually its MD5.
        modified_at: When it was written, seconds since the epoch; None if that is not stated.
        stored_at: When its chunk was stored; None if unknown.
    """

    size: int | None
    etag: str
    modified_at: float | None
    stored_at: float | None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of a whole object.

    Attributes:
        error: Why it is not the record; None if it is.
        size: How many bytes came.
        md5: Their MD5, in hexadecimal.
    """

    error: RecordError | None
    size: int
    md5: str


class BucketObjects:
    """Looks up, reads, writes and removes records. Makes no request by itself.

    What arrives need not be what the bucket holds: gateways answer with pages of their own, with
    another object or with a part of one. So a failed check removes nothing unless the bucket itself
    vouches for the bytes, see `_refuse`.

    Args:
        clock: Seconds since the epoch.

    Raises:
        ConfigError: A file of the settings cannot be read.
    """

    def __init__(self, settings: S3Settings, clock: Callable[[], float] = time.time) -> None:
        assert settings.s3_bucket is not None, "a bucket is needed"
        self._prefix = settings.s3_prefix
        self._ttl_s = settings.chunk_ttl_s
        self._clock = clock
        self.where = f"bucket {settings.s3_bucket!r}" + (
            f" at {settings.s3_endpoint_url}" if settings.s3_endpoint_url else ""
        )
        self._client = BucketClient(settings, clock)

    def close(self) -> None:
        """End running requests and close the connections. Idempotent."""
        self._client.close()

    def probe(self) -> None:
        """Check that the bucket can be asked for an object.

        Raises:
            UnavailableError: It cannot, or it reports that it does not exist.
        """
        self._listed(self._prefix + PROBE, None)

    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is an object for that chunk that has not expired, without reading
        it.

        Raises:
            UnavailableError: The bucket cannot be reached.
        """
        version = self._version(object_name(self._prefix, key))
        return version is not None and not self._is_past(version.stored_at)

    def find(self, key: ChunkKey) -> FoundObject | Miss:
        """Return the record of that chunk with its head read, or the reason why there is none. An
        expired object is removed, and a damaged one if the bucket vouches for the damage.

        Raises:
            UnavailableError: The bucket cannot be read.
        """
        name = object_name(self._prefix, key)
        answer = self._get(name)
        if answer is None:
            return Miss(MissReason.NEVER_STORED)
        version = _version_of(answer)
        pieces = _Pieces(answer)
        found = None
        try:
            found = _found(pieces, key, version.stored_at)
        except RecordError as exc:
            refused = exc
        except FAILURES as exc:
            raise self._unavailable(exc) from exc
        finally:
            if found is None:
                pieces.close()
        if found is None:
            return self._refuse(key, refused)
        if self._is_past(version.stored_at):
            found.close()
            if self._version(name) == version:
                self._discard(name)
            return Miss(MissReason.EXPIRED)
        return found

    def read(self, found: FoundObject, memory: MemoryObj) -> Result:
        """Return the chunk in that memory, verified; or a miss, after releasing the memory. A
        damaged object is removed if the bucket vouches for the damage.

        Raises:
            UnavailableError: The bucket cannot be read any more; the memory is released.
        """
        try:
            hasher = payload_hasher()
            found.pieces.fill(memory.byte_array, hasher.update)
            check_digest(found.header, hasher.digest())
        except RecordError as exc:
            memory.ref_count_down()
            found.close()
            return self._refuse(found.key, exc)
        except FAILURES as exc:
            memory.ref_count_down()
            raise self._unavailable(exc) from exc
        except BaseException:
            memory.ref_count_down()
            raise
        finally:
            found.close()
        return Chunk(found.key, found.header, found.head, memory, BUCKET_TIER, found.stored_at)

    def write(self, chunk: Chunk) -> None:
        """Write a record, replacing any object of its name, in one request: an object exists as a
        whole or not at all.

        Raises:
            UnavailableError: The write was refused.
        """
        headers = {} if chunk.stored_at is None else {STORED_AT: repr(chunk.stored_at)}
        name = object_name(self._prefix, chunk.key)
        with self._request(
            "PUT", name, headers=headers, body=[chunk.head, chunk.memory.byte_array]
        ) as answer:
            if answer.status != 200:
                raise UnavailableError(f"{self.where}: status {answer.status}")

    def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk's object; return whether there was one.

        Raises:
            UnavailableError: The removal failed.
        """
        name = object_name(self._prefix, key)
        if self._version(name) is None:
            return False
        self._delete(name)
        return True

    def clear(self, tenant: str | None) -> int:
        """Remove all records (of that tenant), and nothing else in the bucket; return how many.
        Lists them.

        Raises:
            UnavailableError: The removal failed; some may be gone.
        """
        num_removed = 0
        under = self._prefix if tenant is None else f"{self._prefix}{tenant_name(tenant)}/"
        token = None
        while True:
            names, following = self._listed(under, token)
            for name in names:
                if is_record(name, self._prefix, tenant):
                    self._delete(name)
                    num_removed += 1
            if following in (None, token):
                return num_removed
            token = following

    def _is_past(self, stored_at: float | None) -> bool:
        return (
            self._ttl_s is not None
            and stored_at is not None
            and min(stored_at, self._clock()) + self._ttl_s <= self._clock()
        )

    def _refuse(self, key: ChunkKey, exc: RecordError) -> Miss:
        """Return the miss for bytes that failed a check, and remove the object if it is proven to
        be the damaged one.

        The proof: the bytes are the record of this key but for its own digest, a second read finds
        the same, and the bucket states their MD5 as the object's tag. Without the first, something
        between may have answered in its place; without the last, this host's memory or a gateway
        may have changed the bytes. What is not proven stays, and is replaced by the next store.
        """
        if exc.reason in _OF_ANOTHER_VERSION:
            return miss_for(exc)
        name = object_name(self._prefix, key)
        again = self._read_again(key, name)
        if again is None:
            return miss_for(exc)
        version = self._version(name)
        if str(again.error) != str(exc):
            why_kept = f"another read found {again.error or 'a whole record'}"
        elif version is None or (version.size, version.etag) != (again.size, again.md5):
            why_kept = "the bucket does not vouch for these bytes"
        else:
            if exc.reason is RecordReason.DIGEST:
                self._discard(name)
            return miss_for(exc)
        logger.warning(
            "object unusable, keeping it: object=%s error=%s reason=%s", name, exc, why_kept
        )
        return Miss(MissReason.UNAVAILABLE)

    def _read_again(self, key: ChunkKey, name: str) -> _Reading | None:
        """Read a whole object into separate memory; None if it is gone."""
        answer = self._get(name)
        if answer is None:
            return None
        pieces = _Pieces(answer)
        md5 = hashlib.md5(usedforsecurity=False)
        size = 0

        def saw(part: memoryview) -> None:
            nonlocal size
            md5.update(part)
            size += len(part)

        error = None
        try:
            try:
                found = _found(pieces, key, None, saw)
                block = memoryview(bytearray(min(CHECKED_BYTES, found.payload_bytes)))
                hasher = payload_hasher()
                for begin in range(0, found.payload_bytes, CHECKED_BYTES):
                    part = block[: found.payload_bytes - begin]
                    pieces.fill(part, saw)
                    hasher.update(part)
                check_digest(found.header, hasher.digest())
            except RecordError as exc:
                error = exc
            pieces.drain(MAX_RECORD_BYTES, saw)
        except FAILURES as exc:
            raise self._unavailable(exc) from exc
        finally:
            pieces.close()
        return _Reading(error, size, md5.hexdigest())

    def _discard(self, name: str) -> None:
        """Remove an unusable object, so that a good one can be written there; if that fails, it is
        written over.
        """
        try:
            self._delete(name)
        except UnavailableError as exc:
            logger.warning("cannot remove object: object=%s error=%s", name, exc)

    def _delete(self, name: str) -> None:
        self._request("DELETE", name).close()

    def _version(self, name: str) -> _Version | None:
        with self._request("HEAD", name) as answer:
            return None if answer.status == 404 else _version_of(answer)

    def _get(self, name: str) -> BucketAnswer | None:
        answer = self._request("GET", name)
        if answer.status == 200:
            return answer
        answer.close()
        return None

    def _listed(self, prefix: str, token: str | None) -> tuple[list[str], str | None]:
        """Return names of objects, and the token for more of them; None at the end.

        Raises:
            UnavailableError: There is no list.
        """
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(LIST_OBJECTS)}
        if token is not None:
            query["continuation-token"] = token
        try:
            with self._request("GET", query=query) as answer:
                data = answer.read(MAX_LIST_BYTES).decode("utf-8", "replace")
        except FAILURES as exc:
            raise self._unavailable(exc) from exc
        if answer.status != 200 or "<ListBucketResult" not in data:
            raise UnavailableError(
                f"{self.where}: status {answer.status} and no list of objects; is there such a"
                " bucket?"
            )
        following = _CONTINUED.search(data)
        return [unescape(entry) for entry in _ENTRY.findall(data)], (
            unescape(following[1]) if following else None
        )

    def _request(
        self,
        method: str,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
    ) -> BucketAnswer:
        try:
            return self._client.request(
                method, name, query=query or {}, headers=headers or {}, body=body
            )
        except UnavailableError as exc:
            raise UnavailableError(f"{self.where}: {exc}") from exc

    def _unavailable(self, exc: Exception) -> UnavailableError:
        return UnavailableError(f"{self.where}: {why(exc)}")


class _Pieces:
    """The bytes of an object as they arrive."""

    def __init__(self, answer: BucketAnswer) -> None:
        self._answer = answer

    @property
    def size(self) -> int | None:
        """The length of the object as the answer states it."""
        return self._answer.size

    def fill(self, view: memoryview, saw: Callable[[memoryview], object] | None = None) -> None:
        """Fill a buffer with the next bytes, and pass each part of it to `saw`.

        Raises:
            RecordError: The object ends first.
            OSError: The answer ends before the object does, or its time is over.
        """
        at = 0
        while at < len(view):
            got = self._answer.readinto(view[at : at + DIGESTED_BYTES])
            if got == 0:
                raise RecordError(RecordReason.SHORT, "the object ends within its record")
            if saw is not None:
                saw(view[at : at + got])
            at += got

    def drain(self, limit: int, saw: Callable[[memoryview], object]) -> None:
        block = memoryview(bytearray(CHECKED_BYTES))
        while limit > 0 and (got := self._answer.readinto(block)):
            saw(block[:got])
            limit -= got

    def close(self) -> None:
        self._answer.close()


def _found(
    pieces: _Pieces,
    key: ChunkKey,
    stored_at: float | None,
    saw: Callable[[memoryview], object] | None = None,
) -> FoundObject:
    """Parse the head of a record.

    Raises:
        RecordError: It is malformed, or of another key.
    """
    head = bytearray(PREFIX_BYTES)
    pieces.fill(memoryview(head), saw)
    prefix = decode_prefix(head)
    if pieces.size != prefix.head_bytes + prefix.payload_bytes:
        raise RecordError(RecordReason.SHORT, f"{pieces.size} bytes")
    head += bytes(prefix.head_bytes - PREFIX_BYTES)
    pieces.fill(memoryview(head)[PREFIX_BYTES:], saw)
    header, payload_bytes = decode_head(bytes(head), key.key)
    return FoundObject(key, header, bytes(head), payload_bytes, stored_at, pieces)


def _version_of(answer: BucketAnswer) -> _Version:
    made_at = answer.modified_at
    stored_at = made_at
    if made_at is not None:
        with contextlib.suppress(ValueError):
            stored_at = min(made_at, float(answer.header(STORED_AT) or made_at))
    etag = (answer.header("etag") or "").strip('"').lower()
    return _Version(answer.size, etag, made_at, stored_at)
