"""The address at which an instance serves its chunks: `lm://host:port`, or `lm+tls://host:port` if
it is encrypted.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from lmcache_core.addresses import (
    embedded_ipv4,
    is_unreachable,
    looks_like_address,
    parse_address,
)

MAX_DISTRIBUTED_URL_CHARS: Final = 300

# One expression for the whole text leaves no room for credentials, paths or other things that a URL
# parser would accept.
_URL = re.compile(
    r"lm(?:\+tls)?://(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[1-9][0-9]{0,4})"
)

_ENCRYPTED: Final = "lm+tls://"


class DistributedUrl(NamedTuple):
    """A parsed address.

    Attributes:
        host: A host name or an address; IPv6 without brackets.
        port: 1 to 65535.
    """

    host: str
    port: int


def parse_distributed_url(url: str) -> DistributedUrl:
    """Parse `lm://host:port`, `lm://[address]:port`, or the same with `lm+tls`; see `is_encrypted`.

    Raises:
        ValueError: It has another form, or names an address that no other pod can have:
            unspecified, multicast, link-local (where clouds serve credentials), reserved, or in a
            non-standard spelling.
    """
    match = _URL.fullmatch(url) if len(url) <= MAX_DISTRIBUTED_URL_CHARS else None
    if match is None:
        raise ValueError(
            "a distributed URL must be lm://host:port or lm+tls://host:port, without"
            " credentials or path"
        )
    host, port = match["host"].strip("[]"), int(match["port"])
    if port > 65535:
        raise ValueError("a distributed URL's port must be at most 65535")
    address = parse_address(host)
    # Kubernetes fills a pod's address of either kind into one text, `lm://[$(POD_IP)]:65433`.
    if match["host"].startswith("[") and address is None:
        raise ValueError("a distributed URL must have an address in brackets")
    if ":" not in host and looks_like_address(host) and str(address) != host:
        # The system's resolver also accepts 0, 127.1 or 0x7f000001 as addresses.
        raise ValueError("a distributed URL's IPv4 address must be four decimal numbers")
    if address is not None and embedded_ipv4(address) is not None:
        raise ValueError("a distributed URL's IPv4 address must not be embedded in an IPv6 address")
    if address is not None and is_unreachable(address):
        raise ValueError(
            "a distributed URL must name an address that others can reach: not an unspecified,"
            " multicast, link-local or reserved one"
        )
    return DistributedUrl(host, port)


def is_encrypted(url: str) -> bool:
    """Return whether connections to that distributed URL are encrypted."""
    return url.startswith(_ENCRYPTED)


def distributed_url_of(host: str, port: int, encrypted: bool) -> str:
    """Return the distributed URL for a host and port."""
    return f"{_ENCRYPTED if encrypted else 'lm://'}{f'[{host}]' if ':' in host else host}:{port}"
