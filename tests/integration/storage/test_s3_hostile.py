"""cache_storage as a process whose bucket states impossible lengths."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fixtures.raw_server import RawServer, Reply, running_raw_server
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.storage_process import running_storage
from tests.fixtures.waiting import wait_until
from tests.suites.chunks import make_key, make_payload, make_record

STATED_BYTES = 100_000_000_000
HANG_S = 60.0


def stating(status: int) -> Reply:
    """An answer of that status which begins a body of `STATED_BYTES`; no chunk is there."""

    def reply(method: str, path: str) -> Iterable[bytes]:
        now = 404 if method == "HEAD" else status
        yield f"HTTP/1.1 {now} Whatever\r\ncontent-length: {STATED_BYTES}\r\n\r\n".encode()
        for _ in range(4):
            yield b"<Error>" + b"x" * 4096

    return reply


@pytest.fixture
def bucket() -> Iterator[RawServer]:
    with running_raw_server() as server:
        yield server


@pytest.fixture
def storage(tmp_path: Path, bucket: RawServer) -> Iterator[ServiceProcess]:
    keys = tmp_path / "key"
    keys.write_text("key-of-tests")
    bucket_options = {
        "tier_timeout_s": 1,
        "s3_timeout_s": 2,
        "s3_bucket": "kv",
        "s3_endpoint_url": bucket.url,
        "s3_access_key_file": keys,
        "s3_secret_key_file": keys,
    }
    with running_storage(tmp_path, **bucket_options) as service:
        yield service


@pytest.mark.parametrize("status", [200, 503])
def test_a_length_that_the_bucket_states_costs_a_failed_call_and_no_process(
    storage: ServiceProcess, bucket: RawServer, status: int
) -> None:
    bucket.reply = stating(status)
    url = f"/v1/chunks/{make_key('a').key.to_url()}"
    other = f"/v1/chunks/{make_key('b').key.to_url()}"
    record = make_record("a", make_payload("a", 10_000))
    with httpx.Client(base_url=storage.url, trust_env=False, timeout=HANG_S) as rest:
        assert rest.get(other).status_code == 404
        assert rest.put(url, content=record).status_code == 201
        wait_until(lambda: rest.get("/v1/stats").json()["settled"])
        assert rest.delete(url).status_code == 204
        assert rest.get(other).status_code == 404
        assert rest.get("/readyz").status_code == 200
        assert rest.put(url, content=record).status_code in (201, 204)
        assert rest.get(url).content == record
    asked = {method for method, _ in bucket.asked}
    assert asked >= {"PUT", "GET"}, "the bucket was asked"
    assert storage.stop(signal.SIGTERM) == 0
