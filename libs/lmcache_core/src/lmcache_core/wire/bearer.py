"""The bearer token of an HTTP client, as it is at each request."""

from __future__ import annotations

import ssl
from collections.abc import Generator

import httpx

from lmcache_core.errors import ConfigError
from lmcache_core.security import ShownToken, client_context, no_context, token_text


class BearerAuth(httpx.Auth):
    """Puts a token into every request, in the header `Authorization`.

    Args:
        token: None for none.
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
        """See `httpx.Auth.auth_flow`."""
        text = token_text(self._token)
        if text is not None:
            request.headers["Authorization"] = f"Bearer {text}"
        yield request


def context_for(url: str, tls: ssl.SSLContext | None) -> ssl.SSLContext:
    """What an HTTP client of that URL verifies its server with.

    Args:
        url: Of the server; without `https` nothing is encrypted, and this context trusts nobody.
        tls: As configured; None: who is trusted on this machine.
    """
    if not url.lower().startswith("https:"):
        return no_context()
    return client_context() if tls is None else tls
