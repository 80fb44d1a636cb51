"""The token and the trust of HTTP clients."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.security import TokenFile, client_context
from lmcache_core.security.watched_files import WatchedFiles
from lmcache_core.wire.http_client import BearerAuth, context_for
from lmcache_core.wire.json_http import JsonHttpClient


async def test_each_request_shows_the_token_that_the_file_has_by_then(tmp_path: Path) -> None:
    path, now, shown = tmp_path / "token", [0.0], []

    def answer(request: httpx.Request) -> httpx.Response:
        shown.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    path.write_text("first-token")
    token = TokenFile(path, "token")
    token._watch = WatchedFiles([path], 1.0, lambda: now[0])
    client = JsonHttpClient(
        "lookup", "http://lookup:8081", token, 1.0, transport=httpx.MockTransport(answer)
    )
    await client.open()
    await client.call("GET", "/v1/stats")
    path.write_text("second-token")
    await client.call("GET", "/v1/stats")
    now[0] = 1.0
    await client.call("GET", "/v1/stats")
    await client.close()
    assert shown == ["Bearer first-token", "Bearer first-token", "Bearer second-token"]


def test_without_a_token_there_is_no_header() -> None:
    request = httpx.Request("GET", "http://lookup")
    assert next(BearerAuth(None, "lookup").auth_flow(request)) is request
    assert "authorization" not in request.headers


@pytest.mark.parametrize("token", ["s3cret\n", "s3cret s3cret", "s3crët", ""])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    """The HTTP library would quote the whole header."""
    with pytest.raises(ConfigError, match="visible ASCII") as told:
        JsonHttpClient("lookup", "http://lookup:8081", token, 1.0)
    assert "s3cr" not in str(told.value)


@pytest.mark.parametrize("url", ["http://lookup:8081", "HTTP://lookup"])
def test_where_nothing_is_encrypted_nobody_is_trusted(url: str) -> None:
    given = client_context()
    assert context_for(url, given) is not given
    assert context_for(url, None).get_ca_certs() == []


@pytest.mark.parametrize("url", ["https://lookup:8081", "HTTPS://lookup"])
def test_what_is_encrypted_is_checked(url: str) -> None:
    given = client_context()
    assert context_for(url, given) is given
    assert context_for(url, None).verify_mode is ssl.CERT_REQUIRED
