"""Records as objects of one bucket. Blocking, thread-safe; the only file that uses the client
library.

Objects are named `<prefix><tenant>/<2 hex>/<64 hex>.kvr`, one record each. The 64 digits are the
SHA-256 of its canonical key, as in the names of the disk tier: a name reveals neither model nor
tokens, all names have the same length, and they are evenly distributed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import obstore
from lmcache_core.errors import ConfigError, RecordError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.names import BUCKET_TIER
from lmcache_core.record import (
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
from lmcache_core.security import TokenFile
from lmcache_core.storage.disk.layout import record_name
from lmcache_core.wire.incoming import miss_for
from obstore.exceptions import BaseError
from obstore.store import S3Store

from lmcache_storage.settings import S3Settings

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, S3Config, S3Credential

logger = logging.getLogger(__name__)

STORED_AT: Final = "lmcache-stored-at"
"""Metadata of an object that is newer than its chunk: when the chunk was stored, seconds since the
epoch.
"""
MAX_RETRIES: Final = 1
RETRY_PAUSE_S: Final = 0.05
RETRY_SHARE: Final = 0.5
"""A failed request is repeated only within this part of its time."""
CREDENTIALS_S: Final = 302.0
"""Claimed lifetime of a key from files. The library refreshes keys five minutes before they expire:
here, after two seconds.
"""
LIST_OBJECTS: Final = 1000
MAX_CAUSE_CHARS: Final = 300
CHECKED_BYTES: Final = 1 << 20
"""Size of the pieces in which an object is read for a check."""
PROBE: Final = "lmcache-probe"
_OF_ANOTHER_VERSION: Final = frozenset({RecordReason.VERSION, RecordReason.EXTENSION})

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
        key: Its name.
        header: Its parsed head.
        head: Its head.
        payload_bytes: Length of its payload.
        stored_at: When the chunk was stored, seconds since the epoch.
        pieces: The rest of the object.
    """

    key: ChunkKey
    header: RecordHeader
    head: bytes
    payload_bytes: int
    stored_at: float
    pieces: _Pieces


class BucketObjects:
    """Looks up, reads, writes and removes records. Makes no request by itself.

    Args:
        settings: Name and address of the bucket.
        clock: Seconds since the epoch.

    Raises:
        ConfigError: A file cannot be read, or the library rejects an option.
    """

    def __init__(self, settings: S3Settings, clock: Callable[[], float] = time.time) -> None:
        assert settings.s3_bucket is not None, "a bucket is needed"
        self._prefix = settings.s3_prefix
        self._ttl_s = settings.chunk_ttl_s
        self._clock = clock
        self.where = f"bucket {settings.s3_bucket!r}" + (
            f" at {settings.s3_endpoint_url}" if settings.s3_endpoint_url else ""
        )
        self._store = _create_store(settings)

    def probe(self) -> None:
        """Check that the bucket can be asked for an object.

        Raises:
            UnavailableError: It cannot, or it reports that it does not exist.
        """
        try:
            obstore.list_with_delimiter(self._store, self._prefix + PROBE)
        except (BaseError, OSError) as exc:
            raise self._unavailable(exc) from exc

    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is an object for that chunk that has not expired, without reading
        it.

        Raises:
            UnavailableError: The bucket cannot be reached.
        """
        try:
            answer = obstore.get(
                self._store, object_name(self._prefix, key), options={"head": True}
            )
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as exc:
            raise self._unavailable(exc) from exc
        return not self._is_past(_stored_at(answer))

    def find(self, key: ChunkKey) -> FoundObject | Miss:
        """Return the record of that chunk with its head read, or the reason why there is none. An
        expired object is removed, and a damaged one if a second read finds the same error.

        Raises:
            UnavailableError: The bucket cannot be read.
        """
        name = object_name(self._prefix, key)
        try:
            answer = obstore.get(self._store, name)
            stored_at = _stored_at(answer)
            if self._is_past(stored_at):
                self._discard(name)
                return Miss(MissReason.EXPIRED)
            return _found(answer, key, stored_at)
        except FileNotFoundError:
            return Miss(MissReason.NEVER_STORED)
        except RecordError as exc:
            return self._refuse(key, exc)
        except (BaseError, OSError) as exc:
            raise self._unavailable(exc) from exc

    def read(self, found: FoundObject, memory: MemoryObj) -> Result:
        """Return the chunk in that memory, verified; or a miss, after releasing the memory. A
        damaged object is removed if a second read finds the same error.

        Raises:
            UnavailableError: The bucket cannot be read any more; the memory is released.
        """
        try:
            hasher = payload_hasher()
            found.pieces.fill(memory.byte_array, hasher.update)
            check_digest(found.header, hasher.digest())
        except RecordError as exc:
            memory.ref_count_down()
            return self._refuse(found.key, exc)
        except (BaseError, OSError) as exc:
            memory.ref_count_down()
            raise self._unavailable(exc) from exc
        except BaseException:
            memory.ref_count_down()
            raise
        return Chunk(found.key, found.header, found.head, memory, BUCKET_TIER, found.stored_at)

    def write(self, chunk: Chunk) -> None:
        """Write a record, replacing any object of its name, in one request: an object exists as a
        whole or not at all.

        Raises:
            UnavailableError: The write was refused.
        """
        attributes = {} if chunk.stored_at is None else {STORED_AT: repr(chunk.stored_at)}
        name = object_name(self._prefix, chunk.key)
        try:
            obstore.put(
                self._store,
                name,
                [chunk.head, chunk.memory.byte_array],
                attributes=attributes,
                use_multipart=False,
            )
        except (BaseError, OSError) as exc:
            raise self._unavailable(exc) from exc

    def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk's object; return whether there was one.

        Raises:
            UnavailableError: The removal failed.
        """
        name = object_name(self._prefix, key)
        try:
            obstore.head(self._store, name)
            obstore.delete(self._store, name)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as exc:
            raise self._unavailable(exc) from exc
        return True

    def clear(self, tenant: str | None) -> int:
        """Remove all records (of that tenant), and nothing else in the bucket; return how many.
        Lists them.

        Raises:
            UnavailableError: The removal failed; some may be gone.
        """
        num_removed = 0
        under = self._prefix if tenant is None else f"{self._prefix}{tenant_name(tenant)}/"
        try:
            for batch in obstore.list(self._store, under or None, chunk_size=LIST_OBJECTS):
                names = [
                    found["path"]
                    for found in batch
                    if is_record(found["path"], self._prefix, tenant)
                ]
                if names:
                    obstore.delete(self._store, names)
                num_removed += len(names)
        except FileNotFoundError:
            return num_removed
        except (BaseError, OSError) as exc:
            raise self._unavailable(exc) from exc
        return num_removed

    def _is_past(self, stored_at: float) -> bool:
        return (
            self._ttl_s is not None and min(stored_at, self._clock()) + self._ttl_s <= self._clock()
        )

    def _refuse(self, key: ChunkKey, exc: RecordError) -> Miss:
        """Remove a damaged object if a second read finds the same error: other hosts share the
        bucket, and this host's memory may be faulty.
        """
        if exc.reason in _OF_ANOTHER_VERSION:
            return miss_for(exc)
        name = object_name(self._prefix, key)
        again = self._error_of(key, name)
        if again == str(exc):
            self._discard(name)
        elif again is not None:
            logger.warning(
                "two reads of an object differ, keeping it: object=%s first=%s second=%s",
                name,
                exc,
                again or "whole",
            )
            return Miss(MissReason.UNAVAILABLE)
        return miss_for(exc)

    def _error_of(self, key: ChunkKey, name: str) -> str | None:
        """Return the error of an object, read as a whole: "" if it is intact, None if it is
        gone.
        """
        try:
            found = _found(obstore.get(self._store, name), key, 0)
            block = memoryview(bytearray(min(CHECKED_BYTES, found.payload_bytes)))
            hasher = payload_hasher()
            for begin in range(0, found.payload_bytes, CHECKED_BYTES):
                found.pieces.fill(block[: found.payload_bytes - begin], hasher.update)
            check_digest(found.header, hasher.digest())
        except FileNotFoundError:
            return None
        except RecordError as exc:
            return str(exc)
        except (BaseError, OSError) as exc:
            raise self._unavailable(exc) from exc
        return ""

    def _discard(self, name: str) -> None:
        """Remove an unusable object, so that a good one can be written there; if that fails, it is
        a miss the next time, too.
        """
        try:
            obstore.delete(self._store, name)
        except (BaseError, OSError):
            return

    def _unavailable(self, exc: Exception) -> UnavailableError:
        return UnavailableError(f"{self.where}: {_cause(exc)}")


class _Pieces:
    """The bytes of an object as they arrive."""

    def __init__(self, answer: GetResult) -> None:
        self._pieces: Iterator[bytes] = iter(answer.stream(min_chunk_size=1))
        self._piece = memoryview(b"")

    def fill(self, view: memoryview, saw: Callable[[memoryview], object] | None = None) -> None:
        """Fill a buffer with the next bytes, and pass each part of it to `saw`.

        Raises:
            RecordError: The object ends first.
        """
        at = 0
        while at < len(view):
            if not self._piece:
                piece = next(self._pieces, None)
                if piece is None:
                    raise RecordError(RecordReason.SHORT, "the object ends within its record")
                self._piece = memoryview(piece)
                continue
            taken = min(len(view) - at, len(self._piece))
            view[at : at + taken] = self._piece[:taken]
            if saw is not None:
                saw(view[at : at + taken])
            self._piece = self._piece[taken:]
            at += taken


def _found(answer: GetResult, key: ChunkKey, stored_at: float) -> FoundObject:
    """Parse the head of a record.

    Raises:
        RecordError: It is malformed, or of another key.
    """
    pieces = _Pieces(answer)
    head = bytearray(PREFIX_BYTES)
    pieces.fill(memoryview(head))
    prefix = decode_prefix(head)
    if answer.meta["size"] != prefix.head_bytes + prefix.payload_bytes:
        raise RecordError(RecordReason.SHORT, f"{answer.meta['size']} bytes")
    head += bytes(prefix.head_bytes - PREFIX_BYTES)
    pieces.fill(memoryview(head)[PREFIX_BYTES:])
    header, payload_bytes = decode_head(bytes(head), key.key)
    return FoundObject(key, header, bytes(head), payload_bytes, stored_at, pieces)


class _KeyFiles:
    """Current credentials from two files. Called by the library when it needs them."""

    def __init__(self, access_key: TokenFile, secret_key: TokenFile) -> None:
        self._access_key = access_key
        self._secret_key = secret_key

    def __call__(self) -> S3Credential:
        return {
            "access_key_id": self._access_key.text,
            "secret_access_key": self._secret_key.text,
            "token": None,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S),
        }


def _create_store(settings: S3Settings) -> S3Store:
    limit = timedelta(seconds=settings.s3_timeout_s)
    is_encrypted = settings.s3_endpoint_url is None or settings.s3_endpoint_url.startswith(
        "https://"
    )
    client: ClientConfig = {
        "timeout": limit,
        "connect_timeout": limit,
        "allow_http": not is_encrypted,
    }
    if settings.s3_ca_file is not None:
        try:
            client["root_certificate"] = settings.s3_ca_file.read_bytes()
        except OSError as exc:
            raise ConfigError(
                f"s3_ca_file={str(settings.s3_ca_file)!r} cannot be read: {exc.strerror or exc}"
            ) from exc
    keys = None
    if settings.s3_access_key_file is not None and settings.s3_secret_key_file is not None:
        keys = _KeyFiles(
            TokenFile(settings.s3_access_key_file, "s3_access_key_file"),
            TokenFile(settings.s3_secret_key_file, "s3_secret_key_file"),
        )
    pause = timedelta(seconds=RETRY_PAUSE_S)
    config: S3Config = {
        "region": settings.s3_region,
        "virtual_hosted_style_request": not settings.s3_path_style,
        # TLS and the record's own digest protect it; a third hash would be the largest cost of a
        # write.
        "unsigned_payload": is_encrypted,
        "disable_bulk_delete": True,  # not every server supports it
    }
    if settings.s3_endpoint_url is not None:
        config["endpoint"] = settings.s3_endpoint_url
    try:
        return S3Store(
            settings.s3_bucket,
            config=config,
            client_options=client,
            retry_config={
                "max_retries": MAX_RETRIES,
                "backoff": {"init_backoff": pause, "max_backoff": 2 * pause, "base": 2},
                "retry_timeout": limit * RETRY_SHARE,
            },
            credential_provider=keys,
        )
    except (BaseError, ValueError) as exc:
        raise ConfigError(f"s3_bucket={settings.s3_bucket!r}: {_cause(exc)}") from exc


def _stored_at(answer: GetResult) -> float:
    """Return when the chunk was stored, seconds since the epoch."""
    made_at = answer.meta["last_modified"].timestamp()
    try:
        return min(made_at, float(answer.attributes.get(STORED_AT, made_at)))
    except ValueError:
        return made_at


def _cause(exc: Exception) -> str:
    """Return the error without the response body, which may repeat what was signed."""
    first = str(exc).partition("\n")[0].partition(": <")[0]
    return first[:MAX_CAUSE_CHARS] or type(exc).__name__
