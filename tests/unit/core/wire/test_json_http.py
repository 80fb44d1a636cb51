"""What an HTTP client does and says when a server hangs up."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.security import TlsFiles, client_context
from lmcache_core.wire.json_http import MAX_ATTEMPTS, JsonHttpClient


def hang_up(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/good":
        return httpx.Response(200, json={})
    raise (
        httpx.RemoteProtocolError("Server disconnected")
        if request.url.path == "/bad"
        else httpx.ConnectError("refused")
    )


@pytest.mark.parametrize(("scheme", "expected"), [("https", True), ("http", False)])
async def test_a_certificate_is_spoken_of_until_something_is_answered(
    scheme: str, expected: bool
) -> None:
    transport = httpx.MockTransport(hang_up)
    client = JsonHttpClient(
        "broker",
        f"{scheme}://b:1",
        None,
        5.0,
        transport=transport,
        tls=client_context(TlsFiles(options=("my_cert_file", "my_key_file", "my_ca_file"))),
    )
    await client.open()
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


@pytest.mark.parametrize("error", [httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError])
async def test_a_call_on_a_connection_that_is_closed_just_then_is_made_again(
    error: type[httpx.TransportError],
) -> None:
    server = HangsUp(error)
    client = JsonHttpClient(
        "broker", "http://b:1", None, 5.0, transport=httpx.MockTransport(server.answer)
    )
    await client.open()
    server.num_left = 1
    with pytest.raises(UnavailableError):
        await client.call("GET", "/")
    assert len(server.bodies) == 1, "who has never answered speaks something else"
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


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadTimeout, httpx.ConnectTimeout])
async def test_who_is_away_is_not_asked_again(error: type[httpx.TransportError]) -> None:
    server = HangsUp(error)
    client = JsonHttpClient(
        "broker", "http://b:1", None, 5.0, transport=httpx.MockTransport(server.answer)
    )
    await client.open()
    await client.call("GET", "/")
    server.num_left = 1
    with pytest.raises(UnavailableError, match=error.__name__):
        await client.call("GET", "/")
    assert len(server.bodies) == 2
    await client.close()


@pytest.mark.parametrize("limit_s", [0.1, 60.0])
async def test_a_tls_handshake_that_is_cut_off_leaves_no_connection(limit_s: float) -> None:
    """By the limit on the call, or because its caller is cancelled."""
    ended = asyncio.Event()

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        while await reader.read(1 << 16):
            pass
        ended.set()
        writer.close()

    begun = asyncio.Event()
    async with await asyncio.start_server(never_answers, "127.0.0.1", 0) as server:
        client = JsonHttpClient(
            "broker", f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, limit_s
        )
        await client.open()
        call = asyncio.ensure_future(client.call("GET", "/"))
        await begun.wait()
        if limit_s > 1:
            call.cancel()
        with pytest.raises((UnavailableError, asyncio.CancelledError)):
            await call
        async with asyncio.timeout(9):
            await ended.wait()
        await client.close()
