"""HTTP clients of this project's services: token, TLS trust and connections."""

from __future__ import annotations

import ssl
from collections.abc import Generator, Mapping
from typing import Any

import httpx

from lmcache_core.errors import ConfigError
from lmcache_core.security import ShownToken, client_context, no_context, token_text
from lmcache_core.telemetry.request_context import carried


class BearerAuth(httpx.Auth):
    """Adds the token to every request, in the header `Authorization`.

    Args:
        token: None for none; a token file is re-read when it changes.
        service: Name of the service, for errors.

    Raises:
        ConfigError: The token is not a valid header value.
    """

    def __init__(self, token: ShownToken, service: str) -> None:
        fits = not isinstance(token, str) or (
            token.isascii() and token.isprintable() and token and " " not in token
        )
        if not fits:
            # Checked here because the HTTP library's error would quote the token.
            raise ConfigError(
                f"{service} token: it contains something other than visible ASCII characters; write"
                " the token and nothing around it"
            )
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the current token."""
        text = token_text(self._token)
        if text is not None:
            request.headers["Authorization"] = f"Bearer {text}"
        yield request


def context_for(url: str, tls: ssl.SSLContext | None) -> ssl.SSLContext:
    """Return the context with which an HTTP client of that URL verifies its server.

    Args:
        url: URL of the server; without `https` nothing is encrypted, and this context trusts no
            server.
        tls: Configured context; None trusts the system's authorities.
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
    """Return a connection pool for one service; it does not connect yet.

    Args:
        timeout_s: Longest wait for each step of a call; callers bound the whole call themselves.
        tls: See `context_for`.
        transport: Replaces the network in tests.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        # A compressed answer could exceed its bound.
        headers={"accept-encoding": "identity", **(headers or {})},
        auth=auth,
        timeout=timeout_s,
        limits=limits,
        transport=transport,
        verify=tls,
        event_hooks={"request": [_prepare]},
        # A proxy for the internet does not reach a service in the cluster.
        trust_env=False,
    )


async def _prepare(request: httpx.Request) -> None:
    """Pass on the id of the request being served, and guard any TLS handshake."""
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
