"""Machine code of the codecs' inner loops: compiled once per process, before the first request, and
cached next to the source if that is writable.

Code compiled at installation (`python -m lmcache_core.serde.warm_up`) is read from there, also on a
read-only file system. If none matches this machine's processor and these sources, compiling takes
some seconds at start-up. The files are in `__pycache__`, and trusted like Python's own.

numba looks code up by the exact kind of processor. An image is built on one machine and runs on
others, where it would be compiled at each start: some twenty seconds of processor time. So code for
an image is compiled for a common kind of processor, and a mark next to the code names that kind.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lmcache_core.errors import ConfigError
from lmcache_core.extras import install_line

Loop = Callable[..., Any]
S = TypeVar("S")
T = TypeVar("T")
MARK = Path(__file__).parent / "__pycache__" / "lmcache-processor"
"""File with the name of the kind, next to the machine code."""
GENERIC = "generic"
"""LLVM's name for the features of every processor of the architecture."""
AVX2 = "x86-64-v3"
"""Servers of the last ten years. CacheGen's loops run 2 times as fast as with `generic`, and at 0.8
of the speed of code for the exact processor.

Source: one thread on an AMD EPYC, processor time.
"""
FEATURES_OF_AVX2 = frozenset(
    ["avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2"]
)
"""LLVM's names for what `x86-64-v3` adds to the architecture. Source: x86-64 psABI,
"Micro-architecture levels".
"""


@dataclass(frozen=True)
class Loops:
    """Compiled functions; each is documented with its source, under the same name."""

    encode_sections: Loop
    decode_sections: Loop
    quantise_by_token: Loop
    quantise_by_plane: Loop
    restore: Loop
    choose: Loop
    split: Loop
    join: Loop
    count: Loop


@functools.cache
def load_loops() -> Loops:
    """Compile the loops, or read those compiled at installation. Compiling takes some seconds;
    repeated calls return immediately.

    Raises:
        ConfigError: numba is not installed, or told not to compile.
    """
    check_numba()
    settle_processor()  # before the next line imports numba
    from numba import config

    from lmcache_core.serde import planes, rans, symbols, values

    if config.DISABLE_JIT:
        raise ConfigError(
            "NUMBA_DISABLE_JIT is set: this serde needs compiled code; unset it, or choose another"
            " serde"
        )
    return Loops(
        encode_sections=compiled(rans.encode_sections, [rans.ENCODE_SIGNATURE]),
        decode_sections=compiled(rans.decode_sections, [rans.DECODE_SIGNATURE]),
        quantise_by_token=compiled(values.quantise_by_token, values.QUANTISE_SIGNATURES),
        quantise_by_plane=compiled(values.quantise_by_plane, values.QUANTISE_SIGNATURES),
        restore=compiled(values.restore, values.RESTORE_SIGNATURES),
        choose=compiled(symbols.choose, [symbols.CHOOSE_SIGNATURE]),
        split=compiled(planes.split, [planes.SPLIT_SIGNATURE]),
        join=compiled(planes.join, [planes.JOIN_SIGNATURE]),
        count=compiled(planes.count, [planes.COUNT_SIGNATURE]),
    )


def check_numba() -> None:
    """Check that numba is installed.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("numba") is None:
        raise ConfigError(
            f"this serde needs the package 'numba': {install_line('codec')}, or run the image"
            " lmcache-sidecar-codec"
        )


def compiled(function: Callable[..., Any], signatures: Sequence[str]) -> Callable[..., Any]:
    """Return a function as machine code that releases the GIL. Other argument types are refused
    with a `TypeError`, never compiled for.

    Args:
        function: A function of a module in a file, in numba's subset of Python.
        signatures: Its argument types, for example `void(uint8[::1], int64)`.

    Returns:
        A dispatcher of numba; `is_kept` tells whether its code is stored for other processes.
    """
    import numba
    from numba.core import caching

    class BesideSource(caching.InTreeCacheLocator):
        """Usable even if nothing can be written: existing code can be read."""

        def ensure_cache_path(self) -> None:
            with contextlib.suppress(OSError):
                super().ensure_cache_path()

        def get_source_stamp(self) -> bytes:
            # The numbers of the tables and the options below become part of the machine code.
            here = Path(__file__)
            sources = (Path(inspect.getfile(function)), here, here.with_name("tables.py"))
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


def mark_common_processor() -> str:
    """Make all processes that use this package compile for a common kind of processor, and look for
    code of that kind.

    Returns:
        The kind: the best one that this machine supports.

    Raises:
        OSError: The mark cannot be written.
    """
    kind = AVX2 if has_processor(AVX2) else GENERIC
    MARK.parent.mkdir(exist_ok=True)
    MARK.write_text(kind, encoding="ascii")
    return kind


def settle_processor() -> None:
    """Follow the mark, if there is one. Does nothing if this machine lacks the marked features, or
    if numba may already have compiled code.

    A choice by numba's own variable NUMBA_CPU_NAME takes precedence.
    """
    if "numba" in sys.modules:
        return
    try:
        kind = MARK.read_text(encoding="ascii")
    except OSError:
        return
    if has_processor(kind):
        from numba.core import config

        if config.CPU_NAME is None:
            # No features beyond the kind's: otherwise numba would add this machine's own, and look
            # for code with those.
            config.CPU_NAME, config.CPU_FEATURES = kind, ""


def has_processor(kind: str) -> bool:
    """Return whether code for that kind runs on this machine. Needs llvmlite, which numba depends
    on.
    """
    if kind != AVX2:
        return kind == GENERIC
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in FEATURES_OF_AVX2)


def side_by_side(pool: Executor, work: Callable[[S], T], parts: Iterable[S]) -> list[T]:
    """Return the results of `work` for each part, in their order.

    No work is running when this returns or raises, so the owner of the buffer may then reuse its
    memory. `Executor.map` would leave the others running if the first one fails.

    Args:
        work: Called with each part, on any thread.

    Raises:
        RuntimeError: The pool accepts no more work.
        BaseException: The exception of the first part for which `work` failed.
    """
    futures: list[Future[T]] = []
    try:
        futures += (pool.submit(work, part) for part in parts)
    finally:
        wait(futures)
    return [future.result() for future in futures]
