"""Secrets in files: how Kubernetes hands them to a container."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.errors import ConfigError


def read_secret_file(path: Path | None, option: str) -> str | None:
    """The text of a file that holds one secret, without white space around it.

    Args:
        path: The file, or None for none.
        option: Name of the option, for the error.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{option}={str(path)!r} cannot be read: {exc}") from exc
    if not text:
        raise ConfigError(f"{option}={str(path)!r} is empty")
    return text
