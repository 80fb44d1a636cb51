"""Signature version 4 of requests to S3 and STS.

Source: "Authenticating Requests (AWS Signature Version 4)" in Amazon's reference of the S3 API; its
examples are golden vectors in the tests.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from urllib.parse import quote

UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
EMPTY_PAYLOAD: Final = hashlib.sha256(b"").hexdigest()
_ALGORITHM: Final = "AWS4-HMAC-SHA256"


class Credentials(NamedTuple):
    """A key that requests are signed with.

    Attributes:
        token: Token of a session; None for a permanent key.
        expires_at: When the session ends, seconds since the epoch; None: never.
    """

    access_key: str
    secret_key: str
    token: str | None = None
    expires_at: float | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r})"


def encoded_path(path: str) -> str:
    """Return a path in the form that is requested and signed."""
    return quote(path, safe="/-_.~")


def encoded_query(query: Mapping[str, str]) -> str:
    """Return a query in the form that is requested and signed."""
    return "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in sorted(query.items())
    )


def payload_hash(body: Sequence[bytes | memoryview]) -> str:
    """Return the hash that a signature covers if the body is not encrypted on its way."""
    if not body:
        return EMPTY_PAYLOAD
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return digest.hexdigest()


class Unsigned(NamedTuple):
    """A request that is to be signed.

    Attributes:
        path: Its path, encoded.
        query: Its query, encoded.
        headers: Its headers, `host` among them, with lower-case names.
        payload: Hash of its body, or `UNSIGNED_PAYLOAD`.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    payload: str


def signed_headers(
    credentials: Credentials, region: str, request: Unsigned, now: float
) -> dict[str, str]:
    """Return all headers of a request, signed.

    Args:
        now: Seconds since the epoch.
    """
    method, path, query, headers, payload = request
    at = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    covered = {**headers, "x-amz-content-sha256": payload, "x-amz-date": at}
    if credentials.token is not None:
        covered["x-amz-security-token"] = credentials.token
    names = sorted(covered)
    canonical = "\n".join(
        (
            method,
            path,
            query,
            *(f"{name}:{covered[name].strip()}" for name in names),
            "",
            ";".join(names),
            payload,
        )
    )
    scope = f"{at[:8]}/{region}/s3/aws4_request"
    text = "\n".join((_ALGORITHM, at, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{credentials.secret_key}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return {
        **covered,
        "authorization": (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope},"
            f"SignedHeaders={';'.join(names)},Signature={signature}"
        ),
    }
