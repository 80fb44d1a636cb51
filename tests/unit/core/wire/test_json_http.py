"""HTTP clients: their token and trust, and what they do when a server hangs up."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.security import TlsFiles, TokenFile, client_context
from lmcache_core.wire.http_client import context_for
from lmcache_core.wire.json_http import MAX_ATTEMPTS, JsonHttpClient

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


async def opened(
    answer: Callable[[httpx.Request], httpx.Response], url: str = "http://b:1", **options: Any
) -> JsonHttpClient:
    transport = httpx.MockTransport(answer)
    client = JsonHttpClient("broker", url, None, 60.0, transport=transport, **options)
    await client.open()
    return client


def hang_up(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/good":
        return httpx.Response(200, json={})
    raise (
        httpx.RemoteProtocolError("Server disconnected")
        if request.url.path == "/bad"
        else httpx.ConnectError("refused")
    )


@pytest.mark.parametrize(("scheme", "expected"), [("https", True), ("http", False)])
async def test_missing_certificate_is_suspected_until_a_server_has_answered(
    scheme: str, expected: bool
) -> None:
    tls = client_context(TlsFiles(options=("my_cert_file", "my_key_file", "my_ca_file")))
    client = await opened(hang_up, f"{scheme}://b:1", tls=tls)
    for path, is_hinted in (("/away", False), ("/bad", expected), ("/good", None), ("/bad", False)):
        if is_hinted is None:
            await client.call("GET", path)
            continue
        with pytest.raises(UnavailableError) as caught:
            await client.call("GET", path)
        assert ("set my_cert_file" in str(caught.value)) is is_hinted, path
    await client.close()


class HangsUp:
    """A server that hangs up on the next so many calls.

    Attributes:
        bodies: Of all calls.
        num_left: On which it will.
    """

    def __init__(self, error: type[httpx.TransportError]) -> None:
        self._error = error
        self.bodies: list[bytes] = []
        self.num_left = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(request.content)
        if self.num_left:
            self.num_left -= 1
            raise self._error("gone")
        return httpx.Response(200, json={})


@pytest.mark.parametrize("error", [httpx.RemoteProtocolError, httpx.WriteError])
async def test_call_on_a_connection_that_is_being_closed_is_repeated(
    error: type[httpx.TransportError],
) -> None:
    server = HangsUp(error)
    client = await opened(server.answer)
    server.num_left = 1
    with pytest.raises(UnavailableError):
        await client.call("GET", "/")
    assert len(server.bodies) == 1, "a server that never answered may speak another protocol"
    await client.call("GET", "/")
    server.bodies.clear()
    server.num_left = MAX_ATTEMPTS - 1
    await client.exchange("POST", "/", b"body", {})
    assert server.bodies == [b"body"] * MAX_ATTEMPTS
    server.bodies.clear()
    server.num_left = MAX_ATTEMPTS
    with pytest.raises(UnavailableError, match=error.__name__):
        await client.exchange("POST", "/", b"body", {})
    assert len(server.bodies) == MAX_ATTEMPTS
    await client.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_interrupted_tls_handshake_leaves_no_connection(is_cancelled: bool) -> None:
    """By the limit on the call, or because its caller is cancelled."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        while await reader.read(1 << 16):
            pass
        ended.set()
        writer.close()

    async with await asyncio.start_server(never_answers, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = JsonHttpClient("broker", f"https://127.0.0.1:{port}", None, 5.0)
        await client.open()
        call = asyncio.ensure_future(client.call("GET", "/"))
        await begun.wait()
        if is_cancelled:
            call.cancel()
        with pytest.raises((UnavailableError, asyncio.CancelledError)):
            await call
        async with asyncio.timeout(1.0):
            await ended.wait()
        await client.close()


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadTimeout])
async def test_call_to_an_absent_server_is_not_repeated(error: type[httpx.TransportError]) -> None:
    server = HangsUp(error)
    client = await opened(server.answer)
    await client.call("GET", "/")
    server.num_left = 1
    with pytest.raises(UnavailableError, match=error.__name__):
        await client.call("GET", "/")
    assert len(server.bodies) == 2
    await client.close()
