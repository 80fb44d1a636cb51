"""Advice on what to install if an optional package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str, *packages: str) -> Iterator[None]:
    """Name the extra that contains these packages, if an import in the block fails for one of them.

    Raises:
        ModuleNotFoundError: A package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        name = (exc.name or "").partition(".")[0]
        if name not in packages:
            raise
        raise ModuleNotFoundError(
            f"the package {name!r} is missing: install lmcache-core[{extra}]", name=name
        ) from exc
