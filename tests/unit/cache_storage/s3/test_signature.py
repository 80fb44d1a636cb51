"""Amazon's own examples: "Signature Calculations for the Authorization Header" of the S3 API."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from lmcache_storage.s3.signature import (
    EMPTY_PAYLOAD,
    Credentials,
    Unsigned,
    encoded_path,
    encoded_query,
    payload_hash,
    signed_headers,
)

KEY = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
AT = datetime(2013, 5, 24, tzinfo=UTC).timestamp()
HOST = {"host": "examplebucket.s3.amazonaws.com"}
CONDITIONS = {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"}
LIST = {"prefix": "J", "max-keys": "2"}


@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "payload", "signature"),
    [
        (
            "GET",
            "/test.txt",
            {},
            {"range": "bytes=0-9"},
            EMPTY_PAYLOAD,
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            "/test$file.text",
            {},
            CONDITIONS,
            payload_hash([b"Welcome to ", b"Amazon S3."]),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            "GET",
            "/",
            LIST,
            {},
            payload_hash([]),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
    ids=["get", "put", "list"],
)
def test_requests_are_signed_as_in_amazons_examples(
    method: str,
    path: str,
    query: dict[str, str],
    headers: dict[str, str],
    payload: str,
    signature: str,
) -> None:
    signed = signed_headers(
        KEY,
        "us-east-1",
        Unsigned(method, encoded_path(path), encoded_query(query), HOST | headers, payload),
        AT,
    )
    assert signed["authorization"].endswith(f"Signature={signature}")


def test_a_key_shows_no_secret() -> None:
    assert KEY.secret_key not in repr(KEY)
    assert "hush" not in repr(Credentials("id", "hush-secret", "hush-token"))
