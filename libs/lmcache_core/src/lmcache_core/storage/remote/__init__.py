"""The remote tier: chunks in a server or directory shared by many, selected by a URL's scheme.

Implementations are imported on first use.
"""

from __future__ import annotations

import importlib
from urllib.parse import urlsplit

from lmcache_core.config.registry import FOREIGN_SCHEMES, REMOTE_SCHEMES
from lmcache_core.errors import ConfigError
from lmcache_core.extras import EXTRAS, install_line
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote.base import DEFAULT_TIMEOUT_S, Locate, RemoteOptions
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Locate",
    "RemoteOptions",
    "check_remote_scheme",
    "create_remote_backend",
]


def create_remote_backend(
    url: str,
    token: ShownToken = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    client_name: str = "lmcache",
    accepts: Accepts = ONLY_LOSSLESS,
    locate: Locate | None = None,
    tls: ClientTls | None = None,
) -> StorageBackend:
    """Return the tier that a URL names, not yet opened.

    Args:
        url: `lm://` or `lm+tls://host:port[,host:port…]`, `redis://` or
            `rediss://[user:password@]host:port/db[?ttl_s=…]`,
            `redis-sentinel://[user:password@]host:port,host:port/service[?ttl_s=…]`, or
            `file:///directory`, which must exist and is shared by all who name it.
        token: Bearer token for lm.
        client_name: Name of this process in the server's logs.
        accepts: Records that the server may send, if the protocol can express it; by default only
            lossless ones.
        locate: Finds chunks that are not at home, for lm:// with several servers.
        tls: Trusted authorities and client certificate for lm+tls; None: the system's authorities.

    Raises:
        ConfigError: The URL is malformed, or its client library is not installed.
    """
    scheme = check_remote_scheme(url)
    try:
        module = importlib.import_module(REMOTE_SCHEMES[scheme].module)
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ConfigError(
            f"remote_url={mask_url(url)!r} needs the package {package!r}:"
            f" {install_line(EXTRAS[package])}"
        ) from exc
    backend: StorageBackend = module.create(
        url, RemoteOptions(token, timeout_s, client_name, accepts, locate, tls)
    )
    return backend


def check_remote_scheme(url: str) -> str:
    """Return the scheme of a remote tier's URL.

    Raises:
        ConfigError: No tier has this scheme.
    """
    scheme = urlsplit(url).scheme
    if scheme not in REMOTE_SCHEMES:
        raise ConfigError(
            f"remote_url={mask_url(url)!r}: its scheme must be one of {', '.join(REMOTE_SCHEMES)}"
            + (f"; {FOREIGN_SCHEMES[scheme]}" if scheme in FOREIGN_SCHEMES else "")
        )
    return scheme


def mask_url(url: str) -> str:
    """Return the URL without its credentials and query, for display."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    place, mark, _ = rest.rpartition("@")[2].partition("?")
    return f"{scheme}{separator}{place}{mark and '?…'}"
