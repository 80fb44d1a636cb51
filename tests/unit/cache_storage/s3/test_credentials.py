"""The bucket's key: its sources other than files, played by a server, and what it signs: Amazon's
own examples ("Signature Calculations for the Authorization Header" of the S3 API).
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_storage.s3.credentials import KeyChain
from lmcache_storage.s3.signature import (
    EMPTY_PAYLOAD,
    Credentials,
    Unsigned,
    encoded_path,
    encoded_query,
    payload_hash,
    signed_headers,
)

from tests.fixtures.disk_tier import Clock
from tests.fixtures.raw_server import RawServer, running_raw_server

NOW = 1_800_000_000.0
ENDS_AT = NOW + 3600
ENDS = "2027-01-15T09:00:00Z"
LIMIT_S = 30.0
SESSION = Credentials("id-of-tests", "secret/of+tests", "token==", ENDS_AT)
JSON_KEY = json.dumps(
    {
        "AccessKeyId": SESSION.access_key,
        "SecretAccessKey": SESSION.secret_key,
        "Token": SESSION.token,
        "Expiration": ENDS,
        "Code": "Success",
    }
).encode()
XML_KEY = (
    f"<AssumeRoleWithWebIdentityResponse><Credentials><AccessKeyId>{SESSION.access_key}"
    f"</AccessKeyId><SecretAccessKey>{SESSION.secret_key}</SecretAccessKey><SessionToken>"
    f"{SESSION.token}</SessionToken><Expiration>{ENDS}</Expiration></Credentials>"
    "</AssumeRoleWithWebIdentityResponse>"
).encode()


@pytest.fixture
def source() -> Iterator[RawServer]:
    with running_raw_server() as server:
        yield server


def chain(environ: dict[str, str], clock: Clock | None = None) -> KeyChain:
    return KeyChain("eu-1", ssl.create_default_context(), environ, clock or Clock(NOW))


def said(body: bytes, status: int = 200) -> list[bytes]:
    return [f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode(), body]


def test_variables_win(tmp_path: Path) -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ROLE_ARN": "arn",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "absent"),
    }
    assert chain(environ).find(LIMIT_S) == Credentials("id", "secret", None)
    environ["AWS_SESSION_TOKEN"] = "token"
    assert chain(environ).find(LIMIT_S) == Credentials("id", "secret", "token")


def test_key_for_a_web_identity(tmp_path: Path, source: RawServer) -> None:
    (tmp_path / "token").write_text("identity\n")
    source.reply = lambda method, path: said(XML_KEY)
    environ = {
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/kv",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ENDPOINT_URL_STS": source.url,
    }
    assert chain(environ).find(LIMIT_S) == SESSION
    assert source.asked == [("POST", "/")], "the token is not in the URL"


def test_key_of_a_container(source: RawServer) -> None:
    source.reply = lambda method, path: said(JSON_KEY)
    environ = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{source.url}/v1/credentials?x=1"}
    assert chain(environ).find(LIMIT_S) == SESSION
    assert source.asked == [("GET", "/v1/credentials?x=1")]


def test_key_of_a_machine(source: RawServer) -> None:
    answers = {
        ("PUT", "/latest/api/token"): b"machine-token",
        ("GET", "/latest/meta-data/iam/security-credentials/"): b"role-of-nodes\n",
        ("GET", "/latest/meta-data/iam/security-credentials/role-of-nodes"): JSON_KEY,
    }
    source.reply = lambda method, path: said(answers[method, path])
    assert chain({"AWS_EC2_METADATA_SERVICE_ENDPOINT": source.url}).find(LIMIT_S) == SESSION
    assert source.asked == list(answers)


def test_key_is_renewed_before_its_end_and_used_until_then(source: RawServer) -> None:
    clock = Clock(NOW)
    source.reply = lambda method, path: said(JSON_KEY)
    keys = chain({"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{source.url}/"}, clock)
    for _ in range(3):
        assert keys.find(LIMIT_S) == SESSION
    assert len(source.asked) == 1
    clock.now = ENDS_AT - 60
    source.reply = lambda method, path: said(b"", 500)
    assert keys.find(LIMIT_S) == SESSION, "its source may be away for a while"
    assert len(source.asked) == 2
    clock.now = ENDS_AT
    with pytest.raises(UnavailableError, match="status 500"):
        keys.find(LIMIT_S)


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[" * 100_000, b"{}", JSON_KEY.replace(b"2027", b"soon")]
)
def test_answer_without_a_key_is_unavailability(source: RawServer, answer: bytes) -> None:
    source.reply = lambda method, path: said(answer)
    with pytest.raises(UnavailableError, match="without a key"):
        chain({"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{source.url}/"}).find(LIMIT_S)


def test_without_any_key_the_options_are_named() -> None:
    with pytest.raises(UnavailableError, match="none found; set s3_access_key_file"):
        chain({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}).find(LIMIT_S)


def test_source_that_drips_ends_at_the_deadline(source: RawServer) -> None:
    def drip(method: str, path: str) -> Iterable[bytes]:
        yield b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n"
        while True:
            time.sleep(0.02)  # real time: a server that drips
            yield b" "

    source.reply = drip
    with pytest.raises(UnavailableError, match="no answer in time"):
        chain({"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{source.url}/"}).find(0.5)


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
