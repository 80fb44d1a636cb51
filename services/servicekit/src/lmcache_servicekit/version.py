"""Which build this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(distribution: str) -> str:
    """The version of an installed distribution, `unknown` when it runs from a bare source tree."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
