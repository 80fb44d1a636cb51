"""For which processors machine code is made: this machine's own kind, or a common one, so that it
serves on others too.

numba looks kept code up by the exact kind of processor. An image is built on one machine and runs
on others, where it would be compiled at every start: some twenty seconds of a processor. So code
that is made for an image is made for a common kind, and a mark beside it says so.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

MARK = Path(__file__).parent / "__pycache__" / "lmcache-processor"
"""Holds the name of the kind; lies where the machine code lies."""
GENERIC = "generic"
"""LLVM's name for what every processor of the architecture has."""
AVX2 = "x86-64-v3"
"""Servers of the last ten years. CacheGen's loops run 2 times as fast as `generic`, and at 0.8 of
the speed of code for the very processor.

Source: `lmcachectl codec measure --threads 1` on an AMD EPYC, processor time.
"""
FEATURES_OF_AVX2 = frozenset(
    ["avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2"]
)
"""LLVM's names for what `x86-64-v3` adds to the architecture. Source: x86-64 psABI,
"Micro-architecture levels".
"""


def mark_common_processor() -> str:
    """Let all processes that use this package make their machine code for a common kind of
    processor, and look for code of that kind.

    Returns:
        The kind: the best that this machine has.

    Raises:
        OSError: The mark cannot be kept.
    """
    kind = AVX2 if has_processor(AVX2) else GENERIC
    MARK.parent.mkdir(exist_ok=True)
    MARK.write_text(kind, encoding="ascii")
    return kind


def settle_processor() -> None:
    """Follow the mark, if there is one. Does nothing where this machine lacks what it names, or
    where numba may have compiled already.

    Whoever chose by numba's own variable NUMBA_CPU_NAME keeps that choice.
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
            # No features beside the kind's: numba would add this machine's own, and look for code
            # with those.
            config.CPU_NAME, config.CPU_FEATURES = kind, ""


def has_processor(kind: str) -> bool:
    """Whether code for that kind runs on this machine. Needs llvmlite, which numba brings."""
    if kind != AVX2:
        return kind == GENERIC
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in FEATURES_OF_AVX2)
