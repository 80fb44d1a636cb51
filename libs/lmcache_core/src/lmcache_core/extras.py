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
_WITH_KERNELS = ("kernels", "transformers")
"""Extras that bring lmcache-kernels."""


class _MissingPackageError(ModuleNotFoundError):
    """A package is missing, and the text says what to install."""


def install_line(extra: str, *folders: str) -> str:
    """Return the command that installs an extra. Our packages are on no index: their names may be
    a stranger's there.

    Args:
        extra: Its name.
        folders: Of packages: those of ours that it needs, then the one with the extra; by default
            lmcache-core.
    """
    *before, last = folders or ("libs/lmcache_core",)
    if extra in _WITH_KERNELS:
        before.insert(0, "kernels")
    wanted = [*(f"./{folder}" for folder in before), f"'./{last}[{extra}]'"]
    return f"pip install {' '.join(wanted)} in a checkout"


@contextmanager
def needs_extra(extra: str | None = None) -> Iterator[None]:
    """Tell what to install if an import in the block fails for a package that an extra contains.

    Args:
        extra: The extra to name; by default the one that an inner block named, or that of the
            missing package.

    Raises:
        ModuleNotFoundError: A package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        name = (exc.name or "").partition(".")[0]
        if name not in EXTRAS or (extra is None and isinstance(exc, _MissingPackageError)):
            raise
        line = install_line(extra or EXTRAS[name])
        raise _MissingPackageError(f"the package {name!r} is missing: {line}", name=name) from exc


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
