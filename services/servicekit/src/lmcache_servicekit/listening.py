"""How a service says that it cannot listen at an address of its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_core.errors import ConfigError, UnavailableError


class CannotListenError(ConfigError):
    """An address that the settings name is taken, or not this machine's. Names the options."""


@contextmanager
def naming_listener(host_option: str, host: str, port_option: str, port: int) -> Iterator[None]:
    """Let the failure to listen inside name the options that it is about, as
    `CannotListenError`.
    """
    try:
        yield
    except UnavailableError as exc:
        cause = exc.__cause__
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(exc)
        raise CannotListenError(
            f"{port_option}={port}: cannot listen on {host}: {why}; change {host_option} or"
            f" {port_option}"
        ) from exc
