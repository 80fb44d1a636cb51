"""Fuzzes one target until its time is over or something is found: `python -m tests.fuzz.one_target
TARGET [--plain-loops] CORPUS [options of libFuzzer]`. Needs atheris.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import atheris

INSTRUMENTED = [
    "lmcache_core.serde",
    "lmcache_core.documented",
    "lmcache_core.record",
    "lmcache_core.sidecar",
    "lmcache_core.memory.dtypes",
    "lmcache_core.keys",
    "lmcache_core.config",
    "lmcache_webhook.injection",
]
COMPILED = [
    "lmcache_core.serde.rans",
    "lmcache_core.serde.symbols",
    "lmcache_core.serde.values",
    "lmcache_core.serde.planes",
]
"""numba compiles byte code as it finds it: what is compiled is not instrumented, unless it runs
as plain Python.
"""
PLAIN_LOOPS = "--plain-loops"


def prepared(name: str, has_plain_loops: bool, corpus: Path) -> Callable[[bytes], None]:
    """The target's function, its code instrumented, its seeds written."""
    with atheris.instrument_imports(
        include=INSTRUMENTED, exclude=[] if has_plain_loops else COMPILED
    ):
        targets = importlib.import_module("tests.fuzz.targets")
        plain_loops = importlib.import_module("tests.fuzz.plain_loops")
    target = targets.TARGETS[name]
    if has_plain_loops:
        loops = plain_loops.plain_loops()
        for module in ("serde.chunk_codec", "documented.cachegen.streams"):
            mock.patch(f"lmcache_core.{module}.load_loops", return_value=loops).start()
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
        target.run(seed)
    run: Callable[[bytes], None] = target.run
    return run


def main() -> None:
    """Read the command line, hand the rest of it to libFuzzer."""
    arguments = [argument for argument in sys.argv[1:] if argument != PLAIN_LOOPS]
    run = prepared(arguments[0], PLAIN_LOOPS in sys.argv, Path(arguments[1]))
    atheris.Setup([sys.argv[0], *arguments[1:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
