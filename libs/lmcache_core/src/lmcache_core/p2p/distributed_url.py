"""Where an instance serves its chunks to others: `lm://host:port`, or `lm+tls://host:port` where it is encrypted."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

MAX_DISTRIBUTED_URL_CHARS: Final = 300

# One expression for the whole text leaves no room for credentials, paths or anything that a URL parser would forgive.
_URL = re.compile(r"lm(?:\+tls)?://(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[1-9][0-9]{0,4})")


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
    """Read `lm://host:port`, `lm://[v6]:port`, or the same with `lm+tls`; see `is_encrypted`.

    Raises:
        ValueError: It has another form, or names the unspecified address, on which nobody can be reached.
    """
    match = _URL.fullmatch(url) if len(url) <= MAX_DISTRIBUTED_URL_CHARS else None
    if match is None:
        raise ValueError("a distributed URL has the form lm://host:port or lm+tls://host:port, without credentials or path")
    host, port = match["host"].strip("[]"), int(match["port"])
    if port > 65535:
        raise ValueError("a distributed URL's port is at most 65535")
    address = _address(host, must_be_one=match["host"].startswith("["))
    if address is not None and address.is_unspecified:
        raise ValueError("a distributed URL names an address that others can reach, not the unspecified one")
    return DistributedUrl(host, port)


def is_encrypted(url: str) -> bool:
    """Whether connections to that distributed URL are."""
    return url.startswith(_ENCRYPTED)


def distributed_url_of(host: str, port: int, encrypted: bool) -> str:
    """The URL of an instance there."""
    return f"{_ENCRYPTED if encrypted else 'lm://'}{f'[{host}]' if ':' in host else host}:{port}"


def _address(host: str, must_be_one: bool) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        if must_be_one:
            raise ValueError("a distributed URL holds an IPv6 address in its brackets") from None
        return None
