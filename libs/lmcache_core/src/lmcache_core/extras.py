"""Names that are imported on first use, and what to install if a package for them is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

EXTRAS = MappingProxyType(
    {
        "torch": "torch",
        "numpy": "torch",
        "safetensors": "torch",
        "transformers": "transformers",
        "lmcache_kernels": "kernels",
        "llvmlite": "codec",
        "numba": "codec",
        "redis": "redis",
        "opentelemetry": "traces",
    }
)
"""The extra of lmcache-core that brings a package, by the package's import name."""


def install_line(extra: str) -> str:
    """Return the command that installs an extra of lmcache-core."""
    return f"pip install 'lmcache-core[{extra}]'"


@contextmanager
def needs_extra(extra: str | None = None) -> Iterator[None]:
    """Tell what to install if an import in the block fails for a package that an extra contains.

    Args:
        extra: The extra to name; by default that of the missing package.

    Raises:
        ModuleNotFoundError: A package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        name = (exc.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        line = install_line(extra or EXTRAS[name])
        raise ModuleNotFoundError(f"the package {name!r} is missing: {line}", name=name) from exc


def resolve(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Return a name that a package of the core imports on first use; the body of its `__getattr__`.

    Args:
        package: The package that is asked.
        modules: Where such names are, below `lmcache_core`.
        name: The name.

    Raises:
        AttributeError: It is none of these.
        ModuleNotFoundError: It needs a package that is missing; the text has the extra.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with needs_extra():
        return getattr(importlib.import_module(f"lmcache_core.{modules[name]}"), name)
