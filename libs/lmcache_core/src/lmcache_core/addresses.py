"""What a host in an option or a URL stands for: one place for every spelling of an address."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NUMBER = r"(?:0[xX][0-9A-Fa-f]*|[0-9]+)"
_NUMBERS = re.compile(rf"{_NUMBER}(?:\.{_NUMBER}){{0,3}}")
_ENDS_IN_NUMBER = re.compile(rf"(?:.*\.)?{_NUMBER}")
_THIS_NETWORK: Final = ipaddress.IPv4Network((0, 8))
_WITH_IPV4_AT_THE_END: Final = (
    ipaddress.IPv6Network("::/96"),  # IPv4-compatible
    ipaddress.IPv6Network("64:ff9b::/96"),  # NAT64
    ipaddress.IPv6Network("64:ff9b:1::/48"),  # NAT64 of a site
)
_OWN_NAMES: Final = frozenset(
    {
        "localhost",
        "localhost.localdomain",
        "localhost4",
        "localhost4.localdomain4",
        "localhost6",
        "localhost6.localdomain6",
        "ip6-localhost",
        "ip6-loopback",
    }
)
"""Names that /etc/hosts of some machine gives to loopback."""


def parse_address(host: str) -> Address | None:
    """Return the address that the system's resolver takes `host` for, None if it is a name.

    The resolver also accepts `127.1`, `2130706433`, `0x7f.1`, octal numbers and a final dot.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        bare = host.removesuffix(".")
    try:
        return ipaddress.ip_address(bare)
    except ValueError:
        if _NUMBERS.fullmatch(bare) is None:
            return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(bare))
    except OSError:
        return None


def looks_like_address(host: str) -> bool:
    """Return whether a host ends in a number, as no name of a pod does."""
    return _ENDS_IN_NUMBER.fullmatch(host.rstrip(".")) is not None


def embedded_ipv4(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which packets for an IPv6 address may go, None if there is
    none.
    """
    if isinstance(address, ipaddress.IPv4Address) or address.is_unspecified or address.is_loopback:
        return None
    if any(address in network for network in _WITH_IPV4_AT_THE_END):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo and teredo[1])


def is_loopback(host: str) -> bool:
    """Return whether `host` is certainly reachable from this machine only; a name other than
    `localhost` is not.
    """
    address = parse_address(host)
    if address is None:
        return host.removesuffix(".").lower() == "localhost"
    return (embedded_ipv4(address) or address).is_loopback


def may_be_loopback(host: str) -> bool:
    """Return whether `host` is loopback, or a name that some machines give to it."""
    name = host.rstrip(".").lower()
    return is_loopback(host) or name in _OWN_NAMES or name.endswith(".localhost")


def is_unreachable(address: Address) -> bool:
    """Return whether no other pod can have that address: it is unspecified, multicast, link-local,
    reserved, or begins with 0.
    """
    return (
        address.is_unspecified
        or address.is_multicast
        or address.is_link_local
        or (address.is_reserved and not address.is_loopback)
        or (isinstance(address, ipaddress.IPv4Address) and address in _THIS_NETWORK)
    )
