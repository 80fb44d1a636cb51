"""Machine code of the inner loops: compiled once a process, before the first request, and kept beside the source where that can be written.

Code that was compiled at install (`python -m lmcache_core.serde.warm_up`) is read from there, on a read-only file system too. Where none
fits this machine's processor, compiling takes some seconds at start-up. The files lie in `__pycache__`, trusted like Python's own.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_core.errors import ConfigError


def require_numba() -> None:
    """Check that numba is there.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("numba") is None:
        raise ConfigError("this serde needs the package 'numba'; install lmcache-core[codec]")


def compiled(function: Callable[..., Any], signatures: Sequence[str]) -> Callable[..., Any]:
    """A function as machine code that releases the GIL. Other argument types are refused with a `TypeError`, never compiled for.

    Args:
        function: Of a module in a file; only numba's subset of Python.
        signatures: Its argument types, for example `void(uint8[::1], int64)`.
    """
    import numba
    from numba.core import caching

    class BesideSource(caching.InTreeCacheLocator):
        """Also where nothing can be written: what is there can be read."""

        def ensure_cache_path(self) -> None:
            with contextlib.suppress(OSError):
                super().ensure_cache_path()

    class BesideSourceImpl(caching.CompileResultCacheImpl):
        _locator_classes = (BesideSource,)

    class BesideSourceCache(caching.FunctionCache):
        _impl_class = BesideSourceImpl

        def save_overload(self, sig: Any, data: Any) -> None:
            with contextlib.suppress(OSError):
                super().save_overload(sig, data)

    dispatcher = numba.njit(function, nogil=True, error_model="numpy", fastmath=False, boundscheck=False)
    dispatcher._cache = BesideSourceCache(function)
    for signature in signatures:
        dispatcher.compile(signature)
    dispatcher.disable_compile()
    machine_code: Callable[..., Any] = dispatcher
    return machine_code
