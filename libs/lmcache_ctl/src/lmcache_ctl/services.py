"""Where services are: by URL, or at the default ports of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, Final, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec
from lmcache_core.config.options import shown

from lmcache_ctl.errors import UsageError
from lmcache_ctl.options import PREFIX, CtlSettings

MAX_REPLICAS_OF_A_NAME: Final = 256


class Kind(StrEnum):
    """Kinds of services, in the order in which they are shown."""

    LOOKUP = "lookup"
    BROKER = "broker"
    STORAGE = "storage"
    SIDECAR = "sidecar"


DEFAULT_PORTS: Final = {
    Kind.STORAGE: 8080,
    Kind.LOOKUP: 8081,
    Kind.BROKER: 8082,
    Kind.SIDECAR: 8083,
}
DISTRIBUTIONS: Final = {
    Kind.LOOKUP: "lmcache-lookup",
    Kind.BROKER: "lmcache-broker",
    Kind.STORAGE: "lmcache-storage",
    Kind.SIDECAR: "lmcache-sidecar",
}
"""The name of each in `lmcache_build_info`."""
HOW_TO_AUTHENTICATE: Final = "--token-file FILE or LMCACHE_CTL_TOKEN"


class Endpoint(msgspec.Struct, frozen=True):
    """One process that can be asked.

    Attributes:
        kind: Its expected kind.
        name: For people: its pod, or host and port.
        url: REST address, `http(s)://host:port`.
        tls_name: The name in its certificate, if that is not the host of the URL; None: the host.
        host: The header `Host`, if that is not the host of the URL; None: it is.
        problem: Why it cannot be asked; "" if it can.
        socket_path: Unix socket to connect to; None: connect to the URL.
        pod: Its pod, where it is reached through the Kubernetes API; else "".
        namespace: Of that pod.
        name_prefix: What the names of the release's pods begin with; "" where that is not known.
        token: The token to send: the caller's, else that of its release; None: none is known.
        token_secret: The Secret that has, or should have, its release's token; "" for none.
        token_hint: Why that token is unknown, or another is not sent: the end of a sentence.
        origin: What named it and what changes that, to end a sentence on why it is not reached;
            "" for a default.
    """

    kind: Kind
    name: str
    url: str
    tls_name: str | None = None
    host: str | None = None
    problem: str = ""
    socket_path: str | None = None
    pod: str = ""
    namespace: str = ""
    name_prefix: str = ""
    token: str | None = None
    token_secret: str = ""
    token_hint: str = ""
    origin: str = ""


class Named(Protocol):
    """A service, or what was done with it."""

    @property
    def kind(self) -> str:
        """Its kind."""

    @property
    def name(self) -> str:
        """Which one."""


def names_of(services: Iterable[Named]) -> list[str]:
    """Return `KIND/NAME` of each, as commands take it."""
    return [f"{one.kind}/{one.name}" for one in services]


def services_of(settings: CtlSettings) -> list[Endpoint]:
    """Return the services that the settings name by URL, else those at the default ports.

    Raises:
        UsageError: A URL names no host, an impossible port, or too many addresses.
    """
    if not settings.names_urls:
        here = {kind: f"127.0.0.1:{DEFAULT_PORTS[kind]}" for kind in Kind}
        return [
            Endpoint(kind, name, f"http://{name}", token=settings.token)
            for kind, name in here.items()
        ]
    return [
        service
        for kind in Kind
        for url in getattr(settings, f"{kind}_urls") or ()
        for service in _replicas(kind, url, settings)
    ]


def _origin(kind: Kind, settings: CtlSettings) -> str:
    option, name = f"--{kind}-url", f"{kind}_urls"
    if name not in settings.from_environment:
        return f"; its address is from {option}"
    return f"; its address is from {PREFIX}{name.upper()}, which {option} overrides"


def _replicas(kind: Kind, url: str, settings: CtlSettings) -> Iterator[Endpoint]:
    """Yield each address that a name resolves to, such as a headless service's."""
    tls_name = settings.tls_name
    more: dict[str, Any] = {"token": settings.token, "origin": _origin(kind, settings)}
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise UsageError(f"{shown(url)}: {exc}") from exc
    if not host or parts.username or parts.password:
        raise UsageError(
            f"{shown(url)} must be http(s)://host:port; a token is given with --token-file"
        )
    addresses = _addresses(host)
    if len(addresses) < 2:
        yield Endpoint(kind, parts.netloc, url.rstrip("/"), tls_name, **more)
        return
    for address in addresses:
        at = f"[{address}]" if ":" in address else address
        netloc = at if port is None else f"{at}:{port}"
        target = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))
        yield Endpoint(kind, netloc, target, tls_name or host, parts.netloc, **more)


def _addresses(host: str) -> list[str]:
    """Return the addresses of the family that has most.

    Return none if the name is unknown: a request then fails with a better message.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, set()).add(str(address[0]))
    most = max(by_family, key=lambda family: len(by_family[family]))
    if len(by_family[most]) > MAX_REPLICAS_OF_A_NAME:
        raise UsageError(
            f"{host} leads to {len(by_family[most])} addresses, and {MAX_REPLICAS_OF_A_NAME} are"
            " asked at most: name them one by one"
        )
    return sorted(by_family[most])
