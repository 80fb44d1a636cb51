"""Listening sockets of a service, and errors that name the options to change."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_core.errors import ConfigError, UnavailableError


@contextmanager
def naming_listener(host_option: str, host: str, port_option: str, port: int) -> Iterator[None]:
    """Convert a failure to listen inside the block into a `ConfigError` that names the options."""
    try:
        yield
    except (OSError, UnavailableError) as exc:
        cause = exc if isinstance(exc, OSError) else exc.__cause__
        why = _reason(cause) if isinstance(cause, OSError) else str(exc)
        raise ConfigError(
            f"{port_option}={port}: cannot listen on {host}: {why}; change {host_option} or"
            f" {port_option}"
        ) from exc


def _reason(error: OSError) -> str:
    """Return why, without the address that asyncio adds to it."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address. Connections are refused until a server listens on the socket.

    Args:
        host: Name or address.
        port: 0 picks a free one.

    Raises:
        OSError: The address is taken, or belongs to another machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
