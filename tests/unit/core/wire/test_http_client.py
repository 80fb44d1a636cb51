"""The token and the trust of HTTP clients."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.security import TokenFile, client_context
from lmcache_core.wire.http_client import BearerAuth, context_for
from lmcache_core.wire.json_http import JsonHttpClient

from tests.fixtures.held_clock import HeldClock, watch_files_by


async def test_each_request_shows_the_present_token_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, path, shown = HeldClock(), tmp_path / "token", list[str]()
    watch_files_by(clock, monkeypatch)

    def answer(request: httpx.Request) -> httpx.Response:
        shown.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    path.write_text("first-token")
    token, transport = TokenFile(path, "token"), httpx.MockTransport(answer)
    client = JsonHttpClient("lookup", "http://lookup:8081", token, 1.0, transport=transport)
    await client.open()
    await client.call("GET", "/v1/stats")
    path.write_text("second-token")
    await client.call("GET", "/v1/stats")
    clock.now_s += 1.0
    await client.call("GET", "/v1/stats")
    await client.close()
    assert shown == ["Bearer first-token", "Bearer first-token", "Bearer second-token"]


def test_without_a_token_there_is_no_header() -> None:
    request = httpx.Request("GET", "http://lookup")
    assert next(BearerAuth(None, "lookup").auth_flow(request)) is request
    assert "authorization" not in request.headers


@pytest.mark.parametrize("token", ["s3cret\n", "s3crët", ""])
def test_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    """The HTTP library would quote the whole header."""
    with pytest.raises(ConfigError, match="visible ASCII") as error:
        JsonHttpClient("lookup", "http://lookup:8081", token, 1.0)
    assert "s3cr" not in str(error.value)


@pytest.mark.parametrize("url", ["http://lookup:8081", "HTTP://lookup"])
def test_no_authority_is_trusted_without_encryption(url: str) -> None:
    given = client_context()
    assert context_for(url, given) is not given
    assert context_for(url, None).get_ca_certs() == []


@pytest.mark.parametrize("url", ["https://lookup:8081", "HTTPS://lookup"])
def test_certificate_is_checked_with_encryption(url: str) -> None:
    given = client_context()
    assert context_for(url, given) is given
    assert context_for(url, None).verify_mode is ssl.CERT_REQUIRED
