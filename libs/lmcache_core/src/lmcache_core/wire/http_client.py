"""The HTTP clients of this project's services: their token, trust and connections."""

from __future__ import annotations

import ssl
from collections.abc import Generator, Mapping
from typing import Any

import httpx

from lmcache_core.errors import ConfigError
from lmcache_core.security import ShownToken, client_context, no_context, token_text
from lmcache_core.telemetry.request_context import carried


class BearerAuth(httpx.Auth):
    """Puts a token into every request, in the header `Authorization`.

    Args:
        token: None for none; one from a file is read again when it changes.
        service: What it is shown to, for errors.

    Raises:
        ConfigError: No header can carry the token.
    """

    def __init__(self, token: ShownToken, service: str) -> None:
        fits = not isinstance(token, str) or (
            token.isascii() and token.isprintable() and token and " " not in token
        )
        if not fits:
            # Here and not in the HTTP library, whose complaint would quote the token.
            raise ConfigError(
                f"{service} token: it holds something else than visible ASCII characters; write the"
                " token and nothing around it"
            )
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the current token."""
        text = token_text(self._token)
        if text is not None:
            request.headers["Authorization"] = f"Bearer {text}"
        yield request


def context_for(url: str, tls: ssl.SSLContext | None) -> ssl.SSLContext:
    """Return what an HTTP client of that URL verifies its server with.

    Args:
        url: Of the server; without `https` nothing is encrypted, and this context trusts no server.
        tls: As configured; None trusts what this machine trusts.
    """
    if not url.lower().startswith("https:"):
        return no_context()
    return client_context() if tls is None else tls


def http_client(
    base_url: str,
    auth: BearerAuth,
    timeout_s: float,
    tls: ssl.SSLContext,
    limits: httpx.Limits,
    transport: httpx.AsyncBaseTransport | None = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """Return a connection pool to one service, which connects to nothing yet.

    Args:
        base_url: Of the service.
        auth: Its token.
        timeout_s: Longest wait for each step of a call; callers bound the whole call themselves.
        tls: As `context_for` says.
        limits: Connections at once, and how long they rest.
        transport: Replaces the network in tests.
        headers: Of every request.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        # A compressed answer could grow past its bound.
        headers={"accept-encoding": "identity", **(headers or {})},
        auth=auth,
        timeout=timeout_s,
        limits=limits,
        transport=transport,
        verify=tls,
        event_hooks={"request": [_prepare]},
        # A proxy for the internet does not lead to a service in the cluster.
        trust_env=False,
    )


async def _prepare(request: httpx.Request) -> None:
    """Name the request that this one serves, and guard the TLS handshake that it may need."""
    connected: Any = None

    async def trace(event: str, info: dict[str, Any]) -> None:
        # httpx closes the connection of a handshake that fails, but not of one that is cancelled.
        nonlocal connected
        if event == "connection.connect_tcp.complete":
            connected = info["return_value"]
        elif event == "connection.start_tls.failed" and connected is not None:
            await connected.aclose()

    request.extensions["trace"] = trace
    own = carried()
    if own is not None:
        request.headers.update(own.headers())
