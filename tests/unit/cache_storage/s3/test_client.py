"""Requests to a bucket: one deadline over all steps, one retry, kept connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_storage.s3.client import BucketClient
from lmcache_storage.settings import StorageSettings

from tests.fixtures.gateway import running_gateway
from tests.fixtures.raw_server import RawServer, running_raw_server
from tests.fixtures.s3_server import S3Server, running_s3

LIMIT_S = 0.3
DRIP_S = 0.02
GONE = b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def bucket() -> Iterator[RawServer]:
    with running_raw_server() as server:
        yield server


ClientOf = Callable[..., BucketClient]


@pytest.fixture
def client_of(tmp_path: Path) -> Iterator[ClientOf]:
    """Makes clients of a URL with further options, and closes them."""
    key = tmp_path / "key"
    key.write_text("key-of-tests")
    made: list[BucketClient] = []

    def make(url: str, **options: Any) -> BucketClient:
        settings: dict[str, Any] = {
            "s3_bucket": "kv",
            "s3_endpoint_url": url,
            "s3_access_key_file": key,
            "s3_secret_key_file": key,
            "s3_timeout_s": 60,
        }
        made.append(BucketClient(StorageSettings(**(settings | options))))
        return made[-1]

    yield make
    for client in made:
        client.close()


def dripping(*before: bytes) -> Iterable[bytes]:
    """Never ends by itself, and is never silent for long."""
    yield from before
    while True:
        time.sleep(DRIP_S)  # real time: a server that drips
        yield b"x"


@pytest.mark.parametrize(
    ("method", "before"),
    [
        ("PUT", b"HTTP/1.1 200 OK\r\nx-header: "),
        ("DELETE", b"HTTP/1.1 403 Forbidden\r\ncontent-length: 8000\r\n\r\n"),
        ("GET", b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n"),
    ],
    ids=["header", "error", "body"],
)
def test_answer_that_drips_ends_at_the_deadline(
    bucket: RawServer, client_of: ClientOf, method: str, before: bytes
) -> None:
    bucket.reply = lambda method, path: dripping(before)
    with (
        pytest.raises((UnavailableError, TimeoutError)),
        client_of(bucket.url, s3_timeout_s=LIMIT_S).request(method, "a") as answer,
    ):
        answer.read(9999)


def test_body_that_is_not_read_ends_at_the_deadline(client_of: ClientOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = client_of(url, s3_timeout_s=LIMIT_S)
        with pytest.raises(UnavailableError, match="no answer in time"):
            client.request("PUT", "a", body=[bytes(64 << 20)])


def test_passing_failure_is_retried_once(bucket: RawServer, client_of: ClientOf) -> None:
    client = client_of(bucket.url)
    answers = iter([b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n", GONE])
    bucket.reply = lambda method, path: [next(answers)]
    with client.request("GET", "a") as answer:
        assert answer.status == 404
    bucket.reply = lambda method, path: [b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n"]
    with pytest.raises(UnavailableError, match="status 403"):
        client.request("GET", "b")
    bucket.reply = lambda method, path: []
    with pytest.raises(UnavailableError):
        client.request("GET", "c")
    paths = [path for _, path in bucket.asked]
    assert paths == ["/kv/a"] * 2 + ["/kv/b"] + ["/kv/c"] * 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            b"HTTP/1.1 403 X\r\ncontent-length: 76\r\n\r\n"
            b"<Error><Code>AccessDenied</Code><Message>you signed SECRET</Message></Error>",
            r"^status 403 AccessDenied$",
        ),
        (
            b"HTTP/1.1 301 X\r\nx-amz-bucket-region: eu-2\r\nlocation: http://127.0.0.1:1/\r\n"
            b"content-length: 0\r\n\r\n",
            "set s3_region to 'eu-2'",
        ),
    ],
    ids=["code without text", "region"],
)
def test_refusal_says_what_can_be_done_and_is_not_followed(
    bucket: RawServer, client_of: ClientOf, answer: bytes, error: str
) -> None:
    bucket.reply = lambda method, path: [answer]
    with pytest.raises(UnavailableError, match=error):
        client_of(bucket.url).request("GET", "a")
    assert len(bucket.asked) == 1


def test_proxy_variables_are_ignored(
    bucket: RawServer, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    bucket.reply = lambda method, path: [GONE]
    with client_of(bucket.url).request("GET", "a") as answer:
        assert answer.status == 404


def test_close_ends_running_requests(bucket: RawServer, client_of: ClientOf) -> None:
    asked, over = threading.Event(), threading.Event()

    def silent(method: str, path: str) -> Iterable[bytes]:
        asked.set()
        over.wait(60)
        return []

    bucket.reply = silent
    client = client_of(bucket.url, s3_timeout_s=600)
    failures: list[UnavailableError] = []

    def ask() -> None:
        try:
            client.request("GET", "a")
        except UnavailableError as exc:
            failures.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(60)
    client.close()
    thread.join(60)
    over.set()
    assert len(failures) == 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with running_s3(tmp_path) as server:
        yield server


def test_connections_are_kept_and_replaced_when_the_server_ends_them(
    server: S3Server, client_of: ClientOf
) -> None:
    options = server.options | {"s3_timeout_s": "60"}
    del options["s3_endpoint_url"]
    with running_gateway(int(server.url.rpartition(":")[2])) as gateway:
        client = client_of(gateway.url, **options)
        names = ["a b", "ü", "=2E", "+", "%41"]
        for name in names:
            client.request("PUT", name, body=[name.encode(), b"!"]).close()
        for name in names:
            with client.request("GET", name) as answer:
                assert answer.read(100) == f"{name}!".encode()
        assert gateway.num_connections == 1
        gateway.end_connections()
        for name in names:
            client.request("HEAD", name).close()
            client.request("DELETE", name).close()
            with client.request("GET", name) as answer:
                assert answer.status == 404
