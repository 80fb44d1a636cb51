"""Requests to one bucket, signed, each with one deadline and one retry. Blocking, thread-safe.

The client is our own because what an endpoint states about its answers must not cost more than a
failed call: a common library takes as much memory as the `Content-Length` of an error says, and
ends the process if there is not as much.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.security import TokenFile

from lmcache_storage.s3.connections import FAILURES, BucketAnswer, ConnectionPool, Origin, why
from lmcache_storage.s3.credentials import KeyChain, KeyFiles
from lmcache_storage.s3.signature import (
    EMPTY_PAYLOAD,
    UNSIGNED_PAYLOAD,
    Unsigned,
    encoded_path,
    encoded_query,
    payload_hash,
    signed_headers,
)
from lmcache_storage.settings import S3Settings, environ

RETRY_PAUSE_S: Final = 0.05
RETRY_SHARE: Final = 0.5
"""A failed request is repeated once, within this part of its time."""
MAX_ERROR_BYTES: Final = 8 << 10
NO_BODY: Final[Sequence[bytes | memoryview]] = ()
_NO_HEADERS: Final[Mapping[str, str]] = {}
_NO_QUERY: Final[Mapping[str, str]] = {}
_PASSING: Final = frozenset({429, 500, 502, 503, 504})
"""Statuses with which a request is repeated."""
_REGION: Final = re.compile(r"[a-z0-9-]{1,63}")
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")


class BucketClient:
    """Sends requests to a bucket. Makes none by itself; obeys no proxy variables.

    Args:
        clock: Seconds since the epoch.

    Raises:
        ConfigError: A file of the settings cannot be read.
    """

    def __init__(self, settings: S3Settings, clock: Callable[[], float] = time.time) -> None:
        self._region = settings.s3_region
        self._limit_s = settings.s3_timeout_s
        self._clock = clock
        host = f"s3.{settings.s3_region}.amazonaws.com"
        if not settings.s3_path_style:
            host = f"{settings.s3_bucket}.{host}"
        parts = urlsplit(settings.s3_endpoint_url or f"https://{host}")
        self._is_encrypted = parts.scheme == "https"
        self._path = f"/{settings.s3_bucket}" if settings.s3_path_style else ""
        tls = _tls(settings)
        self._pool = ConnectionPool(
            Origin(parts.hostname or "", parts.port, tls if self._is_encrypted else None)
        )
        self._keys: KeyFiles | KeyChain = KeyChain(settings.s3_region, tls, environ(), clock)
        if settings.s3_access_key_file is not None and settings.s3_secret_key_file is not None:
            self._keys = KeyFiles(
                TokenFile(settings.s3_access_key_file, "s3_access_key_file"),
                TokenFile(settings.s3_secret_key_file, "s3_secret_key_file"),
            )

    def close(self) -> None:
        """End all requests and close the connections. Idempotent."""
        self._pool.close()

    def request(
        self,
        method: str,
        name: str = "",
        *,
        query: Mapping[str, str] = _NO_QUERY,
        headers: Mapping[str, str] = _NO_HEADERS,
        body: Sequence[bytes | memoryview] = NO_BODY,
    ) -> BucketAnswer:
        """Send a request and read the head of its answer, which the caller closes.

        Reading the answer has the same deadline: `s3_timeout_s` from now. At most the body of a
        success is left to read, and that only as far as the caller takes it.

        Args:
            name: Name of the object; "": the bucket.
            headers: Headers of the object, with lower-case names.

        Returns:
            An answer with status 200, 204 or 404.

        Raises:
            UnavailableError: Another status, or no answer in time.
        """
        began = time.monotonic()
        ends_at = began + self._limit_s
        path = encoded_path(f"{self._path}/{name}")
        arguments = encoded_query(query)
        # TLS and the record's own digest protect it; a third hash would be the largest cost of a
        # write.
        is_unsigned = body and self._is_encrypted
        payload = UNSIGNED_PAYLOAD if is_unsigned else payload_hash(body) if body else EMPTY_PAYLOAD
        host = {"host": self._pool.origin.host_header}
        unsigned = Unsigned(method, path, arguments, host | dict(headers), payload)
        for is_last in (False, True):
            try:
                answer = self._pool.request(
                    method,
                    path + (f"?{arguments}" if arguments else ""),
                    signed_headers(
                        self._keys.find(ends_at - time.monotonic()),
                        self._region,
                        unsigned,
                        self._clock(),
                    ),
                    body,
                    ends_at,
                )
            except (*FAILURES, ValueError) as exc:
                error, may_pass = UnavailableError(why(exc)), True
                error.__cause__ = exc
            else:
                if answer.status in (200, 204, 404):
                    return answer
                error, may_pass = _refusal(answer), answer.status in _PASSING
            if is_last or not may_pass or time.monotonic() > began + RETRY_SHARE * self._limit_s:
                raise error
            time.sleep(RETRY_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")


def _refusal(answer: BucketAnswer) -> UnavailableError:
    """Return an error with status and code, without the text, which may repeat what was signed."""
    region = _REGION.fullmatch(answer.header("x-amz-bucket-region") or "")
    with answer:
        try:
            code = _CODE.search(answer.read(MAX_ERROR_BYTES))
        except FAILURES:
            code = None
    text = f"status {answer.status}" + (f" {code[1].decode()}" if code else "")
    if 300 <= answer.status < 400:
        text += ", the bucket is in another region: set s3_region" + (
            f" to {region[0]!r}" if region else ""
        )
    return UnavailableError(text)


def _tls(settings: S3Settings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.s3_ca_file is not None:
        try:
            context.load_verify_locations(settings.s3_ca_file)
        except OSError as exc:  # includes what is no certificate
            raise ConfigError(
                f"s3_ca_file={str(settings.s3_ca_file)!r} cannot be read: {exc.strerror or exc}"
            ) from exc
    return context
