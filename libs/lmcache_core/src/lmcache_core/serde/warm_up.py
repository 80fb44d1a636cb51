"""Compiles the machine code of all codecs, so that no process has to: call it when an image is
built or a package was installed.

The code is kept next to the source, in `__pycache__`, for processors of this machine's kind
(`--portable`: of a common kind, and all processes that use this package then look for that); a
later process reads it from there, also where nothing can be written. `python -m
lmcache_core.serde.warm_up` says where it lies and how long that took. No torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from lmcache_core.errors import ConfigError
from lmcache_core.serde.machine_code import check_numba, load_loops, mark_common_processor


@dataclass(frozen=True)
class WarmUp:
    """What warming up came to.

    Attributes:
        num_compiled: How many variants of loops were compiled.
        num_read: How many had been, and were read.
        folders: Where their code is kept.
        not_kept: Loops whose code could not be kept, by name.
    """

    num_compiled: int
    num_read: int
    folders: tuple[Path, ...]
    not_kept: tuple[str, ...]
    seconds: float


def warm_up() -> WarmUp:
    """Make the machine code of all codecs ready in this process, and keep it for others where that
    is possible.

    Raises:
        ConfigError: numba is not installed.
    """
    began = time.monotonic()
    loops = load_loops()
    dispatchers = [getattr(loops, field.name) for field in fields(loops)]
    stats = [dispatcher.stats for dispatcher in dispatchers]
    return WarmUp(
        sum(sum(stat.cache_misses.values()) for stat in stats),
        sum(sum(stat.cache_hits.values()) for stat in stats),
        tuple(dict.fromkeys(Path(stat.cache_path) for stat in stats)),
        tuple(dispatcher.__name__ for dispatcher in dispatchers if not dispatcher.is_kept),
        time.monotonic() - began,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Warm up and tell; 1 where the code cannot be kept, 2 where it cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m lmcache_core.serde.warm_up", description=__doc__
    )
    parser.add_argument(
        "--portable",
        action="store_true",
        help="for other machines too: code for a common kind of processor",
    )
    is_portable = parser.parse_args(arguments).portable
    try:
        if is_portable:
            check_numba()
            print(f"for processors of the kind {mark_common_processor()}")
        found = warm_up()
    except ConfigError as exc:
        print(f"warm_up: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"warm_up: the kind of processor cannot be kept: {exc}", file=sys.stderr)
        return 1
    print(
        f"{found.num_compiled} loops compiled, {found.num_read} read, in {found.seconds:.1f} s;"
        " their code is kept in"
    )
    print("\n".join(f"  {folder}" for folder in found.folders))
    if found.not_kept:
        print(
            f"warm_up: {', '.join(found.not_kept)} could not be kept there: let these folders be"
            " written",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
