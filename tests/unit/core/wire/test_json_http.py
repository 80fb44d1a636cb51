"""What an HTTP client says of a server that hangs up."""

from __future__ import annotations

import httpx
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.security import client_context
from lmcache_core.wire.json_http import JsonHttpClient


def hang_up(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/good":
        return httpx.Response(200, json={})
    raise httpx.RemoteProtocolError("Server disconnected") if request.url.path == "/bad" else httpx.ConnectError("refused")


@pytest.mark.parametrize(("scheme", "expected"), [("https", True), ("http", False)])
async def test_a_certificate_is_spoken_of_until_something_is_answered(scheme: str, expected: bool) -> None:
    transport = httpx.MockTransport(hang_up)
    client = JsonHttpClient("broker", f"{scheme}://b:1", None, 5.0, transport=transport, tls=client_context(cert_option="my_cert_file"))
    await client.open()
    for path, is_hinted in (("/away", False), ("/bad", expected), ("/good", None), ("/bad", False)):
        if is_hinted is None:
            await client.call("GET", path)
            continue
        with pytest.raises(UnavailableError) as caught:
            await client.call("GET", path)
        assert ("set my_cert_file" in str(caught.value)) is is_hinted, path
    await client.close()
