"""Machine code of the inner loops: compiled once a process, before the first request, and kept
beside the source where that can be written.

Code that was compiled at install (`python -m lmcache_core.serde.warm_up`) is read from there, on a
read-only file system too. Where none fits this machine's processor (or the common kind that was
chosen at install: `processor.py`) and these sources, compiling takes some seconds at start-up. The
files lie in `__pycache__`, trusted like Python's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmcache_core.errors import ConfigError
from lmcache_core.serde.entropy.processor import settle_processor


def require_numba() -> None:
    """Check that numba is there, and settle for which processors it compiles; before anything
    imports it.

    Raises:
        ConfigError: It is not.
    """
    check_numba()
    settle_processor()


def check_numba() -> None:
    """Check that numba is there.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("numba") is None:
        raise ConfigError(
            "this serde needs the package 'numba': install lmcache-core[codec], or run the image"
            " lmcache-sidecar-codec"
        )


def compiled(function: Callable[..., Any], signatures: Sequence[str]) -> Callable[..., Any]:
    """A function as machine code that releases the GIL. Other argument types are refused with a
    `TypeError`, never compiled for.

    Args:
        function: Of a module in a file; only numba's subset of Python.
        signatures: Its argument types, for example `void(uint8[::1], int64)`.

    Returns:
        A dispatcher of numba; `is_kept` tells whether its code is there for other processes.
    """
    import numba
    from numba.core import caching

    class BesideSource(caching.InTreeCacheLocator):
        """Also where nothing can be written: what is there can be read."""

        def ensure_cache_path(self) -> None:
            with contextlib.suppress(OSError):
                super().ensure_cache_path()

        def get_source_stamp(self) -> bytes:
            # numbers of this package become part of the machine code of others: those of the
            # tables, and the options below
            sources = (Path(inspect.getfile(function)), *sorted(Path(__file__).parent.glob("*.py")))
            return hashlib.sha256(
                b"".join(hashlib.sha256(path.read_bytes()).digest() for path in sources)
            ).digest()

    class BesideSourceImpl(caching.CompileResultCacheImpl):
        _locator_classes = (BesideSource,)

    class BesideSourceCache(caching.FunctionCache):
        _impl_class = BesideSourceImpl
        is_kept = True

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            with contextlib.suppress(OSError):
                return super().load_overload(sig, target_context)
            return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except OSError:
                self.is_kept = False

    dispatcher = numba.njit(
        function, nogil=True, error_model="numpy", fastmath=False, boundscheck=False
    )
    dispatcher._cache = BesideSourceCache(function)
    for signature in signatures:
        dispatcher.compile(signature)
    dispatcher.disable_compile()
    dispatcher.is_kept = dispatcher._cache.is_kept
    machine_code: Callable[..., Any] = dispatcher
    return machine_code
